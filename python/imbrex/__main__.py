"""Runs the program `imbrex` of the package: python -m imbrex."""
import os
import sys


def main():
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", "imbrex")
    os.execv(program, ["imbrex", *sys.argv[1:]])


if __name__ == "__main__":
    main()
