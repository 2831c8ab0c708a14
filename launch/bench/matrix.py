"""Run the tests of the pipeline engine over releases of DeepSpeed and torch, each pair in its own
environment.

    python launch/bench/matrix.py --deepspeed 0.19.3 newest --torch 2.13.0 --folder .matrix

Environments stay in the folder and are used again. Arguments for pip, such as an index of CPU builds of
torch, come from its own variables (PIP_EXTRA_INDEX_URL, ...). Prints one row for each pair; ends with 1 if a
test failed.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEEPSPEED = ("0.19.3", "0.19.6", "newest")
TORCH = ("2.5.1", "2.13.0", "2.14.1")  # the oldest, the one that the Makefile takes, the newest
TESTS = (
    "tests/test_transparency.py",
    "tests/engine/test_kinds.py",
    "tests/test_bugs.py",
    "tests/engine/test_engine.py",
    "tests/simulate",
    "tests/engine/test_dualpipev.py",
    "tests/test_public_names.py",
)


def install(folder: Path, deepspeed: str, torch: str) -> Path:
    """Create an environment with both packages and return its Python."""
    python = folder / "bin" / "python"
    done = folder / "installed"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [python, "-m", "pip", "install", "-qq"]
        release = "deepspeed" if deepspeed == "newest" else f"deepspeed=={deepspeed}"
        subprocess.run([*pip, f"torch=={torch}", "setuptools>=70.1", "wheel", "ninja"], check=True)
        # deepspeed's setup imports the torch that it will run with
        subprocess.run([*pip, "--no-build-isolation", release], check=True)
        subprocess.run([*pip, "--no-build-isolation", "-e", f"{ROOT}[test]"], check=True)
        done.touch()
    return python


def versions(python: Path) -> tuple[str, str]:
    code = "from importlib.metadata import version; print(version('deepspeed'), version('torch'))"
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return tuple(done.stdout.split())


def unusable(python: Path) -> str:
    """Return why DeepSpeed cannot be imported there without ds_compress; empty if it can."""
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([python, "-c", "import deepspeed"], env=environment, capture_output=True, text=True)
    return f"`import deepspeed` fails: {done.stderr.splitlines()[-1][:70]}..." if done.returncode else ""


def run(python: Path, tests: list[str]) -> str:
    """Run the tests and return pytest's last line."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [python, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    found = re.findall(r"^=*\s*(\d+ (?:passed|failed|error|skipped).*?)\s*=*$", done.stdout, re.MULTILINE)
    return found[-1] if found else f"pytest ended with {done.returncode}: {done.stderr.strip()[-200:]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--deepspeed", nargs="+", default=DEEPSPEED)
    parser.add_argument("--torch", nargs="+", default=TORCH)
    parser.add_argument("--tests", nargs="+", default=TESTS)
    parser.add_argument("--folder", type=Path, default=ROOT / ".matrix")
    args = parser.parse_args()

    print("| DeepSpeed | torch | tests |\n|---|---|---|", flush=True)
    bad = False
    for torch in args.torch:
        for deepspeed in args.deepspeed:
            try:
                folder = args.folder.absolute() / f"deepspeed-{deepspeed}-torch-{torch}"
                python = install(folder, deepspeed, torch)
                row = [*versions(python), unusable(python) or run(python, args.tests)]
            except subprocess.CalledProcessError as error:
                row = [deepspeed, torch, f"could not be installed: {error}"]
            # a pair that does not go together says nothing about us
            tested = not row[-1].startswith("`import")
            bad = bad or (tested and ("passed" not in row[-1] or "failed" in row[-1] or "error" in row[-1]))
            print(f"| {' | '.join(row)} |", flush=True)
    sys.exit(bad)


if __name__ == "__main__":
    main()
