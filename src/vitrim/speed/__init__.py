"""Speed on this machine: engines, and dense and reduced models timed in turn on them."""
