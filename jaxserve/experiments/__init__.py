"""Experiments: a file becomes cells, each cell a run or a plan in a process of its own, all of them one folder of results, tables and plots."""
