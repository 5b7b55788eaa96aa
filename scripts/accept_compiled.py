"""Says whether this host takes the programs of a folder that `jaxserve compile` made, and whether they compute the same as freshly compiled ones.

For hosts with a TPU or GPU: their runtimes have not been seen to load programs that were compiled where no chip was.

    python scripts/accept_compiled.py DIR [MODEL] [SECTION.KEY=VALUE ...]

Starts an engine twice, from the folder and without it, both without jax's cache on disk. Prints what was taken, what was not and why, both starts' seconds,
and one JSON object as the last line. Exit 0 only if every step was taken and the tokens are the same.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROMPTS = ("The capital of France is", "Once upon a time", "1, 2, 3,")
_SUMMARY = re.compile(r": (\d+) programs used, (\d+) compiled here")
_MISS = re.compile(r"(\S+) is not taken from .*?: (.*)")


def generate(words: list[str]) -> tuple[list[list[int]], str, float]:
    """Token ids of the answers, what was said on stderr, and the seconds from start to end."""
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    command = [sys.executable, "-m", "jaxserve", "generate", *prompts, "--json", "--temperature", "0", "--max-tokens", "16"]
    started = time.perf_counter()
    done = subprocess.run([*command, "engine.warmup=yes", "engine.compilation_cache=no", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stderr}\nthe engine did not start: exit status {done.returncode}")
    return [json.loads(line)["token_ids"] for line in done.stdout.splitlines()], done.stderr, time.perf_counter() - started


def settings_of(folder: Path) -> list[str]:
    """The settings that the folder's programs were compiled for, as words of a command line."""
    from jaxserve.engine.programs.manifest import read_manifest

    settings = read_manifest(folder).settings()
    return [f"{key}={','.join(map(str, value)) if isinstance(value, list) else value}" for key, value in settings.items() if value is not None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("words", nargs="*", metavar="MODEL|SECTION.KEY=VALUE")
    options = parser.parse_args()
    tokens, said, seconds = generate(["--compiled", str(options.folder), *options.words])
    plain, _, plain_seconds = generate([*settings_of(options.folder), *options.words])
    summary = _SUMMARY.search(said)
    report: dict[str, Any] = {
        "used": int(summary.group(1)) if summary else 0,
        "compiled_here": dict(_MISS.findall(said)),
        "same_tokens": tokens == plain,
        "seconds": {"from the folder": round(seconds, 1), "without it": round(plain_seconds, 1)},
    }
    print(f"{report['used']} programs taken, {len(report['compiled_here'])} compiled here")
    for name, reason in report["compiled_here"].items():
        print(f"  {name}: {reason}")
    print(f"tokens {'are the same' if report['same_tokens'] else 'DIFFER'}; {seconds:.0f} s from the folder, {plain_seconds:.0f} s without it")
    print(json.dumps(report))
    return 0 if summary and report["used"] and not report["compiled_here"] and report["same_tokens"] else 1


if __name__ == "__main__":
    sys.exit(main())
