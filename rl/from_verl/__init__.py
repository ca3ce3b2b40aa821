"""Translates a verl command into ours, and says of each of verl's keys what it is here.

command.py reads a verl command or shell script, table.py has every key, keys.py says what a row of it holds, verl_run.py is the
run that is translated, meanings.py says what its values mean together (those of the algorithm: algorithm.py), translate.py puts
them together; __main__.py is the command line. docs/make.py writes docs/generated/verl-keys.md out of the tables.
"""
