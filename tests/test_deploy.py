"""Dockerfile and config/kubernetes, as far as they can be checked without Docker and without a cluster."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import requests
import ts
import yaml

from scripts.package import ROOT
from scripts.serve import pick_ports
from tests.client import said_until_up

KUBERNETES = ROOT / "config" / "kubernetes"
NGINX = ROOT / "config" / "nginx"
LAYERS = ["base", "gpu", "autoscale", "kserve"]
OWN_SCHEMA = {"Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy", "ConfigMap"}


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's (instruction, arguments), continued lines joined."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines]


def arguments(name: str) -> list[str]:
    return [text for instruction, text in instructions() if instruction == name]


def documents(folder: Path) -> list[dict[str, Any]]:
    return [document for file in sorted(folder.glob("*.yaml")) for document in yaml.safe_load_all(file.read_text())]


def rendered(layer: str) -> list[dict[str, Any]]:
    """What kustomize makes of a folder."""
    if shutil.which("kubectl") is None and shutil.which("kustomize") is None:
        pytest.skip("neither kubectl nor kustomize is installed")
    command = ["kustomize", "build"] if shutil.which("kustomize") else ["kubectl", "kustomize"]
    done = subprocess.run([*command, str(KUBERNETES / layer)], capture_output=True, text=True, check=True)
    return list(yaml.safe_load_all(done.stdout))


def one(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = [document for document in documents if document["kind"] == kind]
    return found


def pod_of(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """The pod, of the Deployment or the InferenceService."""
    if any(document["kind"] == "InferenceService" for document in documents):
        predictor: dict[str, Any] = one(documents, "InferenceService")["spec"]["predictor"]
        return predictor
    pod: dict[str, Any] = one(documents, "Deployment")["spec"]["template"]["spec"]
    return pod


def check_references(documents: list[dict[str, Any]]) -> None:
    """Names of volumes, config maps and ports inside one layer; ports against nginx's own configuration."""
    pod = pod_of(documents)
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = [mount for container in pod["containers"] for mount in container.get("volumeMounts", [])]
    assert {mount["name"] for mount in mounts} == set(volumes)
    config_map = one(documents, "ConfigMap")
    assert volumes["instances"]["configMap"]["name"] == config_map["metadata"]["name"]
    assert {mount["subPath"] for mount in mounts if mount["name"] == "instances"} == set(config_map["data"])
    assert volumes["clients"]["secret"]["secretName"] == "gr00t-clients"

    gate = next(container for container in pod["containers"] if container["command"][0] == "nginx")
    server = next(container for container in pod["containers"] if container["name"] == "torchserve")
    text = (NGINX / "gr00t.conf").read_text() + config_map["data"]["instances.conf"]
    listens = set(map(int, re.findall(r"^ *listen (\d+);", text, re.MULTILINE)))
    ports = {port["name"]: port["containerPort"] for port in gate["ports"]}
    probed = gate["readinessProbe"]["httpGet"]["port"]
    assert {*ports.values(), ports.get(probed, probed)} == listens == {8000, 8090}
    assert gate["command"][gate["command"].index("-c") + 1] == "/app/config/nginx/gr00t.conf"
    assert {f"/app/config/nginx/{name}" for name in re.findall(r"include (\S+);", text)} == {
        mount["mountPath"] for mount in gate["volumeMounts"]
    }
    ready = server["command"][server["command"].index("--ready-port") + 1]
    assert f"proxy_pass http://127.0.0.1:{ready};" in text
    check_serve_options(server["command"])
    if "--checkpoint" in server["command"]:
        folder = server["command"][server["command"].index("--checkpoint") + 1]
        assert folder in {mount["mountPath"] for mount in server["volumeMounts"]}
    assert "--no-auth" in server["command"] and "--host" not in server["command"], "no key, so loopback only"
    closed = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert [container["securityContext"] for container in pod["containers"]] == [closed, closed]
    assert pod["securityContext"] == {"runAsNonRoot": True, "runAsUser": 10001, "fsGroup": 10001,
                                      "seccompProfile": {"type": "RuntimeDefault"}}  # fmt: skip
    assert gate["image"] == server["image"] and gate["image"].split("/")[-1].startswith("gr00t-torchserve")


def check_serve_options(command: list[str]) -> None:
    """A command line that ./scripts/serve takes, with files that the image has."""
    assert command[0] == "./scripts/serve"
    usage = subprocess.run([sys.executable, str(ROOT / "scripts" / "serve.py"), "--help"], capture_output=True,
                           text=True, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}).stdout  # fmt: skip
    for word in command[1:]:
        if word.startswith("-"):
            assert re.search(rf"^ +{re.escape(word)}\b", usage, re.MULTILINE), word
        if word.endswith(".yaml"):
            assert (ROOT / word).is_file()


def test_the_manifests_of_the_base_keep_their_schemas() -> None:
    for document in documents(KUBERNETES / "base"):
        if document["kind"] != "Kustomization":
            assert kubernetes_validate.validate(document, "1.30", strict=True)


@pytest.mark.parametrize("layer", LAYERS)
def test_what_kustomize_makes_of_a_layer(layer: str) -> None:
    made = rendered(layer)
    for document in made:
        if document["kind"] in OWN_SCHEMA:
            assert kubernetes_validate.validate(document, "1.30", strict=True)
    check_references(made)
    if layer == "kserve":
        assert {document["kind"] for document in made} == {"ConfigMap", "InferenceService"}
        return
    assert {document["kind"] for document in made} >= OWN_SCHEMA
    deployment, service = one(made, "Deployment"), one(made, "Service")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert service["spec"]["selector"].items() <= labels.items()
    assert one(made, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"].items() <= labels.items()
    policy = one(made, "NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    names = {port["name"] for container in pod_of(made)["containers"] for port in container.get("ports", [])}
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= names
    assert {port["port"] for rule in policy["ingress"] for port in rule["ports"]} == names
    annotations = deployment["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == "8090"
    gpus = [c["resources"]["limits"].get("nvidia.com/gpu") for c in pod_of(made)["containers"]]
    assert gpus == [None, None] if layer == "base" else ["1", None]


def test_files_that_kustomizations_name_are_there() -> None:
    for layer in LAYERS:
        kustomization = yaml.safe_load((KUBERNETES / layer / "kustomization.yaml").read_text())
        assert set(kustomization) <= {"apiVersion", "kind", "resources", "patches", "configMapGenerator", "images"}
        named = list(kustomization["resources"]) + [patch["path"] for patch in kustomization.get("patches", [])]
        named += [file for entry in kustomization.get("configMapGenerator", []) for file in entry["files"]]
        for name in named:
            assert (KUBERNETES / layer / name).exists(), f"{layer}: {name}"
    base, kserve = (KUBERNETES / layer / "instances.conf" for layer in ("base", "kserve"))
    assert base.read_bytes() == kserve.read_bytes(), "kustomize reads no file outside of its folder"


def test_the_autoscaler_asks_for_what_torchserve_exports() -> None:
    (scaled,) = [d for d in documents(KUBERNETES / "autoscale") if d["kind"] == "ScaledObject"]
    assert scaled["apiVersion"] == "keda.sh/v1alpha1"
    deployment = one(documents(KUBERNETES / "base"), "Deployment")
    assert scaled["spec"]["scaleTargetRef"] == {"name": deployment["metadata"]["name"]}
    (trigger,) = scaled["spec"]["triggers"]
    asked = set(re.findall(r"\bts_\w+", trigger["metadata"]["query"]))
    metrics = yaml.safe_load((Path(ts.__file__).parent / "configs" / "metrics.yaml").read_text())
    counters = {counter["name"]: counter["dimensions"] for counter in metrics["ts_metrics"]["counter"]}
    assert asked == {"ts_queue_latency_microseconds", "ts_inference_requests_total"}
    assert all("model_name" in counters[name] for name in asked)
    assert float(trigger["metadata"]["threshold"]) > 0 and trigger["metricType"] == "Value"


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_nginx_takes_the_configuration_of_a_pod(tmp_path: Path) -> None:
    shutil.copy(NGINX / "gr00t.conf", tmp_path)
    shutil.copy(KUBERNETES / "base" / "instances.conf", tmp_path)
    shutil.copy(NGINX / "clients.map.example", tmp_path / "clients.map")
    command = ["nginx", "-p", str(tmp_path), "-c", str(tmp_path / "gr00t.conf"), "-t"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# The image


def copied(into: Path) -> None:
    """Does the Dockerfile's COPY lines, as far as .dockerignore lets files through."""
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignore[0] == "*"
    let_through = [line[1:] for line in ignore if line.startswith("!")]
    shut_out = [line for line in ignore[1:] if not line.startswith("!")]

    def ignored(folder: str, names: list[str]) -> list[str]:
        paths = {name: str((Path(folder) / name).relative_to(ROOT)) for name in names}
        return [
            name for name, path in paths.items()
            if any(fnmatch.fnmatch(f"/{path}", pattern if pattern[0] == "*" else f"/{pattern}") for pattern in shut_out)
        ]  # fmt: skip

    for text in arguments("COPY"):
        source, target = shlex.split(text)
        assert source in let_through, source
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, into / target, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / source, into / target)


def test_the_dockerfile() -> None:
    (base,), (user,), (volume,) = arguments("FROM"), arguments("USER"), arguments("VOLUME")
    assert re.fullmatch(r"python:3\.1[0-2]-slim", base)
    assert int(user) > 0 and f"--uid {user}" in " ".join(arguments("RUN")) and volume == "/app/.run"
    entrypoint = json.loads(arguments("ENTRYPOINT")[0])
    check_serve_options(entrypoint)
    assert "--no-auth" not in entrypoint, "others reach this address"
    ready = entrypoint[entrypoint.index("--ready-port") + 1]
    assert f"http://127.0.0.1:{ready}/ready" in arguments("HEALTHCHECK")[0] and ready in arguments("EXPOSE")[0]
    pods = {d["spec"]["template"]["spec"]["securityContext"]["runAsUser"]
            for d in documents(KUBERNETES / "base") if d["kind"] == "Deployment"}  # fmt: skip
    assert pods == {int(user)}
    assert not re.search(r"(?i)bearer|password|token|secret", " ".join(text for _, text in instructions()))


def test_the_files_of_the_image_serve(tmp_path: Path) -> None:
    """Its entry point, run in a folder with what COPY copies: it listens for others, and management does not."""
    app = tmp_path / "app"
    app.mkdir()
    copied(app)
    assert not (app / "config" / "nginx" / "clients.map").exists() and not list(app.rglob("__pycache__"))
    ports = pick_ports(0)
    ready = pick_ports(0)[0]
    entrypoint = [str(ready) if word == "8083" else word for word in json.loads(arguments("ENTRYPOINT")[0])]
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with subprocess.Popen(
        [*entrypoint, "--port", str(ports[0])], cwd=app, env={**clean, "GR00T_PYTHON": sys.executable},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            said = said_until_up(process)
            assert "READY after" in said and "model API   off" in said, said
            health = arguments("HEALTHCHECK")[0].split("CMD ", 1)[1]
            probe = [sys.executable if word == "python" else word.replace("8083", str(ready))
                     for word in json.loads(health)]  # fmt: skip
            assert subprocess.run(probe).returncode == 0
            other = "127.0.0.2"  # not the address that a server of loopback alone listens on
            keys = json.loads((app / ".run" / "key_file.json").read_text())
            headers = {"Authorization": f"Bearer {keys['inference']['key']}", "Content-Type": "application/json"}
            url = f"http://{other}:{ports[0]}/predictions/gr00t"
            assert requests.post(url, data=b"{}", headers=headers, timeout=60).status_code == 422
            assert requests.post(url, data=b"{}", timeout=60).status_code == 400
            assert requests.get(f"http://{other}:{ports[2]}/metrics", timeout=60).status_code == 200
            assert requests.get(f"http://{other}:{ready}/ready", timeout=60).status_code == 200
            with pytest.raises(requests.ConnectionError):
                requests.get(f"http://{other}:{ports[1]}/models", timeout=60)
            manager = {"Authorization": f"Bearer {keys['management']['key']}"}
            models = f"http://127.0.0.1:{ports[1]}/models"
            assert requests.get(models, headers=manager, timeout=60).status_code == 200
            assert requests.post(f"{models}?url=gr00t.mar", headers=manager, timeout=60).status_code == 405
        finally:
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(60)
            finally:
                process.kill()  # else `with` waits for ever; the keeper then takes the rest down
