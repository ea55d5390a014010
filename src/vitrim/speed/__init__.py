"""How fast models run here: engines, and dense and reduced models timed in turn on them."""
