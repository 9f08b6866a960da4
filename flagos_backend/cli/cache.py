"""Show what flagos keeps in the user's cache folder, or clear it."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from flagos_backend.cli.failure import CommandFailed
from flagos_backend.process.cache import cache_root


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("show", "clear"), nargs="?", default="show")


def run(options: argparse.Namespace) -> int:
    folder = cache_root()
    if folder is None:
        raise CommandFailed("there is no cache folder: neither XDG_CACHE_HOME nor HOME is an absolute path; set one")
    print(folder if folder.is_dir() else f"{folder} (does not exist)")
    for part in sorted(folder.iterdir()) if folder.is_dir() else ():
        files = [part] if not part.is_dir() else [path for path in part.rglob("*") if path.is_file()]
        size = sum(path.lstat().st_size for path in files)
        print(f"  {part.name}: {len(files)} files, {size / 1024:.1f} KiB")
    if options.action == "clear" and folder.exists():
        _clear(folder)
        print("cleared")
    return 0


def _clear(folder: Path) -> None:
    if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
        raise CommandFailed(f"{folder} is a link or not this user's; remove it by hand if that is meant")
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise CommandFailed(f"{error.filename} cannot be removed ({error.strerror}); change its permissions") from error
