"""Makes the C++ of ds_compress ready when it is installed, so that training compiles nothing; the rest is in
setup.cfg. Where there is no compiler the package is installed all the same, and plain torch serves."""

import importlib.util
import re
import tempfile
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

NATIVE = Path("ds_compress", "kernels", "native")


def read(name):
    """A module that needs nothing but the standard library; importing the package would need torch."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / NATIVE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build, prebuilt = read("build"), read("prebuilt")


class BuildWithLibraries(build_py):
    def run(self):
        super().run()
        if not self.editable_mode:  # a source tree changes: what it compiles is kept by its hash
            self.make_libraries(Path(self.build_lib, NATIVE, prebuilt.FOLDER))

    def make_libraries(self, folder):
        """Every source for every kind of processor that this machine may meet; what fails is left out."""
        compiler = build.compiler()
        folder.mkdir(exist_ok=True)
        for old in folder.glob("*.so"):
            old.unlink()
        for source in (path.stem for path in build.HERE.rglob("*.cpp") if compiler):
            for target in prebuilt.targets():
                try:
                    with tempfile.TemporaryDirectory() as place:
                        made = build.compile_source(compiler, source, Path(place), target)
                        (folder / prebuilt.name(source, target)).write_bytes(made.read_bytes())
                except (build.Refused, build.Interrupted, OSError, ValueError) as error:
                    self.warn(f"{source} is left uncompiled for {target}: {error}")


class WheelWithLibraries(bdist_wheel):
    """For one kind of machine where it holds libraries, for every Python."""

    def run(self):
        self.run_command("build")
        folder = Path(self.get_finalized_command("build").build_lib, NATIVE, prebuilt.FOLDER)
        self.root_is_pure = not any(folder.glob("*.so"))
        self.distribution.has_ext_modules = lambda: not self.root_is_pure
        super().run()

    def get_tag(self):
        tag = super().get_tag()
        return tag if self.root_is_pure else ("py3", "none", tag[2])


class WholeTree(sdist):
    """With the link that setuptools passes over, as it has seen the folder behind it already."""

    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, files)
        Path(base_dir, "ds_configs").symlink_to("ds_compress/recipes")


def described(readme):
    """`readme` as a package index shows it, where links to files of the tree lead nowhere: their words alone,
    and no pictures."""
    relative = r"\]\((?!https?:)[^)]*\)"
    return re.sub(rf"\[([^]]*){relative}", r"\1", re.sub(rf"!\[[^]]*{relative}\n*", "", readme))


setup(
    long_description=described(Path(__file__).with_name("README.md").read_text()),
    cmdclass={"build_py": BuildWithLibraries, "bdist_wheel": WheelWithLibraries, "sdist": WholeTree},
)
