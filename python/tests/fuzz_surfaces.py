"""Wrong arguments through the Python surfaces: every call gets an exception or a result, and a right call gives the same bits afterwards.

    python fuzz_surfaces.py                      # all cases, in processes that may crash
    python fuzz_surfaces.py --case 17            # one, here, and what happens in it
    python fuzz_surfaces.py --of torch --cases 500

With a module built with AddressSanitizer (scripts/python_fuzz.sh) a kernel that reads one byte beyond an array ends the program. Arrays are as
large as they claim to be: what a caller can get wrong are numbers, shapes, types and strides.
"""

import argparse
import importlib
import random
import subprocess
import sys
import traceback

from fuzz_mistakes import make_mistake


def run_case(number, surfaces, verbose=False):
    """One case; an AssertionError where a promise is broken."""
    rng = random.Random(number)
    name, make = surfaces[number % len(surfaces)]
    surface = make(rng)
    right = surface.call(surface.arguments)
    mistakes = []
    wrong = dict(surface.arguments)
    for _ in range(rng.randint(1, 3)):
        mistakes += make_mistake(wrong, rng)
    told = f"case {number}, {name}: {'; '.join(mistakes)}"
    if verbose:
        print(told, flush=True)
    try:
        surface.call(wrong)
        said = "a result"
    except Exception as error:  # of any kind, as long as it is one of Python and says something
        said = f"{type(error).__name__}: {error}"
        assert not isinstance(error, SystemError), f"{told}: {said}"
        assert str(error) or isinstance(error, (AssertionError, NotImplementedError, MemoryError)), f"{told}: no word in a {type(error).__name__}"
        assert getattr(error, "code", "") not in ("internal", "api.internal"), f"{told}: {said}"
        assert not any(word in str(error) for word in ("vector::", "basic_string", "std::")), f"{told}: {said}"
    if verbose:
        print(said)
    again = surface.call(surface.arguments)
    assert len(again) == len(right) and all(a.tobytes() == b.tobytes() for a, b in zip(again, right)), f"{told}: other bits after it ({said})"


def run_here(options, surfaces):
    """Cases one after the other; says which comes next, so that somebody knows when this process is gone."""
    failures = 0
    for number in range(options.first, options.first + options.cases):
        if options.child:
            print(f"case {number}", flush=True)
        try:
            run_case(number, surfaces, verbose=not options.child)
        except AssertionError as error:
            print(f"FAILED {error}", flush=True)
            failures += 1
        except Exception:  # of a right call
            print(f"FAILED case {number}: {traceback.format_exc()}", flush=True)
            failures += 1
    if options.child:
        print("case all", flush=True)
    return failures


def run_in_children(options):
    """The same in a child; after a crash the next child goes on behind the case that crashed."""
    failures, number, last = 0, options.first, options.first + options.cases
    while number < last:
        command = [sys.executable, __file__, "--child", "--of", options.of, "--first", str(number), "--cases", str(last - number)]
        child = subprocess.run(command, capture_output=True, text=True, errors="replace")
        finished = False
        for line in child.stdout.splitlines():
            if line == "case all":
                finished = True
            elif line.startswith("case "):
                number = int(line.split()[1]) + 1
            else:
                print(line)
                failures += line.startswith("FAILED")
        if finished:
            break
        failures += 1
        print(f"FAILED case {number - 1} ended the process with status {child.returncode}:\n{child.stderr[-options.tail :]}", flush=True)
    return failures


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", default="numpy", help="numpy or torch: the framework whose arrays are given")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--case", type=int, help="only this one, here")
    parser.add_argument("--tail", type=int, default=3000, help="characters of a crash's report")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.case is not None:
        options.first, options.cases = options.case, 1
    if options.case is not None or options.child:
        surfaces = importlib.import_module(f"fuzz_{options.of}").SURFACES
        return min(run_here(options, surfaces), 1)
    failures = run_in_children(options)
    print(f"{options.cases} cases of {options.of}, {failures} failed")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
