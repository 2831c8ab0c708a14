"""Compile the C++ kernels when the package is installed; setup.cfg describes everything else.

Without a C++ compiler the package is installed all the same: codecs then run in PyTorch.
"""

import os
import re
import runpy
import shlex
import shutil
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist
from setuptools.errors import CompileError
from setuptools.modified import newer_group

KERNELS = Path("ds_compress", "kernels")
JOBS = 2
"""Compilers at a time, where `--parallel` does not say how many."""

library = runpy.run_path(
    str(KERNELS / "library.py")
)  # to import the package torch would have to be installed
sources = library["sources"]()
libraries = {
    f"ds_compress.kernels.{library['file'](name).stem}": name for name in library["instruction_sets"]()
}


class BuildKernels(build_ext):
    """Compiles all sources into one library for each instruction set.

    In place, as for an editable installation, only those for this processor and for DS_COMPRESS_CPU."""

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', '/')}.so"

    def run(self) -> None:
        if self.inplace:
            wanted = {*library["supported"]()[:1], os.environ.get(library["CPU"])}
            self.extensions = [
                each
                for each in self.extensions
                if (name := libraries[each.name]) in wanted
                and (self.force or not library["is_current"](library["file"](name)))
            ]
        try:
            super().run()
        except ValueError as error:  # setuptools splits $CXX, $CC and $CFLAGS as a shell does
            self.warn(f"no kernels are compiled, as a variable of the compiler cannot be read: {error}")

    def build_extensions(self) -> None:
        largest_first = sorted(
            (path for path in sources if path.suffix == ".cpp"), key=lambda path: -path.stat().st_size
        )
        with ThreadPoolExecutor(self.parallel or JOBS) as pool:
            objects = {
                each.name: [pool.submit(self.compile, path, libraries[each.name]) for path in largest_first]
                for each in self.extensions
            }
            for each in self.extensions:
                Path(self.get_ext_fullpath(each.name)).unlink(missing_ok=True)  # it may be of other sources
                with self._filter_build_errors(each):
                    self.link(each, [made.result() for made in objects[each.name]])

    def compile(self, source: Path, instruction_set: str) -> Path:
        """Compile `source`, unless its object is newer than it and all headers."""
        object_file = Path(self.build_temp, instruction_set, source).with_suffix(".o")
        headers = [path for path in sources if path.suffix == ".h"]
        if self.force or newer_group([source, *headers, KERNELS / "library.py"], object_file):
            target = [f"-march={instruction_set}"] if instruction_set.startswith("x86-64") else []
            call_compiler([*library["FLAGS"], *target, "-c", source], object_file)
        return object_file

    def link(self, extension: Extension, objects: Iterable[Path]) -> None:
        """Link `objects`, and what tells the library from others, to the library of `extension`."""
        made = Path(self.get_ext_fullpath(extension.name))
        symbol, source = library["BUILD_ID"], Path(self.build_temp, "build_id.cpp")
        build_id = f"{self.distribution.get_version()} {library['sources_hash']()}"
        variable = f"const char* const {symbol}"
        source.write_text(f'extern "C" {{ extern {variable}; {variable} = "{build_id}"; }}\n')
        call_compiler(["-shared", "-fPIC", "-pthread", *objects, source], made)


def call_compiler(words: Iterable[str | Path], made: Path) -> None:
    """Let the compiler, $CXX or the first one that is found, make a file.

    Raises:
        CompileError: there is none, or it fails.
    """
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), "g++")
    made.parent.mkdir(parents=True, exist_ok=True)
    half = made.with_suffix(f".{os.getpid()}")  # where it is interrupted, no part of a file is taken for one
    try:
        subprocess.run([*shlex.split(compiler), *words, "-o", half], check=True)
        half.replace(made)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        raise CompileError(str(error)) from None


class KernelWheel(bdist_wheel):
    """A wheel for every Python; with libraries for one kind of machine, without any for all."""

    def run(self) -> None:
        self.run_command("build")
        made = Path(self.get_finalized_command("build").build_lib, KERNELS)
        self.root_is_pure = not any(made.glob("*.so"))
        self.distribution.has_ext_modules = lambda: not self.root_is_pure
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        tag = super().get_tag()
        return tag if self.root_is_pure else ("py3", "none", tag[2])


class WholeTree(sdist):
    """With the link that setuptools passes over, because it has seen the folder behind it already."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        Path(base_dir, "ds_configs").symlink_to("ds_compress/recipes")


def described(readme: str) -> str:
    """`readme` as a package index shows it: without pictures, and without links to files of the tree."""
    relative = r"\]\((?!https?:)[^)]*\)"
    return re.sub(rf"\[([^]]*){relative}", r"\1", re.sub(rf"!\[[^]]*{relative}\n*", "", readme))


setup(
    long_description=described(Path(__file__).with_name("README.md").read_text()),
    ext_modules=[Extension(name, [str(path) for path in sources], optional=True) for name in libraries],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": KernelWheel, "sdist": WholeTree},
)
