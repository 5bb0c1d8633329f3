"""This machine: paths, files, processes, processors and memory, progress."""
