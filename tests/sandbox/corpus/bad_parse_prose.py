# rung: parse
# reason: SyntaxError
Sure! Here is an environment in which the player explores a cave:

The class will be called CaveEnv and it's going to be fun.
