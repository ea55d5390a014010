"""Training: recipes, the loop and the steps; `vitrim train` is the command. Importing this imports nothing heavy."""
