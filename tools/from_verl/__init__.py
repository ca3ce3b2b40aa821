"""Translates a verl command into ours, and explains what becomes of each of verl's keys.

command.py reads a verl command or shell script, table.py has every key out of the YAML files, verl_run.py is the run to
translate, meanings.py, algorithm.py and split.py interpret its values, translate.py puts all together, and __main__.py is the
command line. docs/make.py makes docs/generated/verl-keys.md from the tables.
"""
