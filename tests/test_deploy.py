"""The image, the services beside it and the unit: what they name exists, and agrees with the server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from starlette.routing import Route

from bankfull.cli.app import run_command
from bankfull.errors import ConfigError
from bankfull.serve.app import create_app
from bankfull.serve.guard.checks import OPEN_PATHS, access_policy
from bankfull.serve.guard.keys import Keyring, keys_of_environment
from bankfull.serve.guard.layers import protect
from bankfull.serve.telemetry.metrics import ServiceMetrics
from tests.serve.scripted import Scripted, scripted_texts, settings

ROOT = Path(__file__).parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
SCRAPE = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())["scrape_configs"][0]
PROVISIONING = ROOT / "deploy/grafana/provisioning"


def instructions() -> list[tuple[str, str]]:
    """(name, arguments), with continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", " ")
    lines = (line.partition(" ") for line in text.splitlines() if line.strip())
    return [(name, " ".join(rest.split())) for name, _, rest in lines]


def last_stage(name: str) -> list[str]:
    """The arguments of that instruction in the stage that becomes the image."""
    found = instructions()
    begin = max(i for i, (instruction, _) in enumerate(found) if instruction == "FROM")
    return [rest for instruction, rest in found[begin:] if instruction == name]


def served_paths() -> set[str]:
    backend = Scripted()
    app = create_app(backend, scripted_texts(), settings())
    protect(app, backend, access_policy(Keyring(), host="127.0.0.1"), ServiceMetrics())
    return {route.path for route in app.routes if isinstance(route, Route)}


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def container_ports(service: dict[str, Any]) -> set[str]:
    return {published.rpartition(":")[2] for published in service["ports"]}


# -- the image


def test_the_image_has_a_user_of_its_own_and_needs_no_other() -> None:
    (user,) = last_stage("USER")
    (added,) = (rest for rest in last_stage("RUN") if "useradd" in rest)
    assert user.isdecimal() and int(user) > 0 and f"--uid {user}" in added
    ran = [name for name, _ in instructions()]
    assert ran.index("USER") < ran.index("ENTRYPOINT"), "what is started is not root's"
    (volumes,) = last_stage("VOLUME")
    (install,) = re.findall(r"install -d -o bankfull -g bankfull ([/ \w]+)", added)
    assert set(json.loads(volumes)) == set(install.split()), "a volume belongs to the user"


def test_the_image_keeps_models_and_data_in_its_volumes() -> None:
    (volumes,), environment = map(last_stage, ("VOLUME", "ENV"))
    places = dict(re.findall(r"(BANKFULL_CACHE|HF_HOME|BANKFULL_DATA)=(\S+)", " ".join(environment)))
    assert len(places) == 3
    for name, place in places.items():
        assert any(Path(place).is_relative_to(volume) for volume in json.loads(volumes)), name
    assert "ARG MODEL=" in DOCKERFILE.splitlines(), "no model unless one is asked for"


def test_torch_comes_first_and_for_cpus_alone() -> None:
    installs = [rest for name, rest in instructions() if name == "RUN" and "pip" in rest]
    assert "$TORCH" in installs[0] and "torch.version.cuda" in installs[0] and "bankfull" not in installs[0]
    wanted = re.search(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert wanted is not None and ("ARG", f"TORCH={wanted[1]}") in instructions(), "the version that is tested"


def test_what_the_image_copies_is_there_and_not_ignored() -> None:
    (ignored, *kept) = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] not in ("", "#")]
    assert ignored == "*"
    copied = [rest.split()[:-1] for name, rest in instructions() if name == "COPY" and "--from" not in rest]
    for source in (source for sources in copied for source in sources):
        assert (ROOT / source).exists() and f"!{source}" in kept, source


def test_the_health_check_asks_a_path_that_needs_no_key() -> None:
    (check,), (command,), (exposed,) = map(last_stage, ("HEALTHCHECK", "CMD", "EXPOSE"))
    asked = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", check)
    assert asked is not None
    assert asked[2] in served_paths() and asked[2] in OPEN_PATHS
    assert asked[1] == exposed == option(json.loads(command), "--port")


def test_the_image_s_own_code_compiles() -> None:
    """What stands in quotes there, no linter sees."""
    (check,) = last_stage("HEALTHCHECK")
    compile(json.loads(check[check.index("[") :])[2], "HEALTHCHECK", "exec")
    for code in re.findall(r'python -c "([^"]+)"', DOCKERFILE):
        compile(code, "RUN", "exec")


@pytest.mark.parametrize("command", [json.loads(last_stage("CMD")[0]), SERVICES["bankfull"]["command"]])
def test_the_server_in_a_container_wants_keys(command: list[str]) -> None:
    """It listens on every address, and nobody has said --no-auth for its users."""
    host = option(command, "--host")
    assert command[0] == "serve" and host == "0.0.0.0" and "--no-auth" not in command
    with pytest.raises(ConfigError, match="BANKFULL_API_KEY"):
        access_policy(Keyring(), host=host)
    keyring = Keyring(keys_of_environment({"BANKFULL_API_KEY": "a-key-of-sixteen-characters"}))
    assert access_policy(keyring, host=host).keyring is keyring


def test_options_of_the_containers_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["serve", "--help"]) == 0
    known = capsys.readouterr().out
    for command in (json.loads(last_stage("CMD")[0]), SERVICES["bankfull"]["command"]):
        for word in command:
            assert not word.startswith("--") or word in known, word


# -- the services


def test_services_are_published_on_this_machine_alone() -> None:
    for name, service in SERVICES.items():
        assert service["ports"], name
        assert all(str(published).startswith("127.0.0.1:") for published in service["ports"]), name


def test_a_missing_key_or_password_stops_compose() -> None:
    assert SERVICES["bankfull"]["environment"]["BANKFULL_API_KEY"].startswith("${BANKFULL_API_KEY:?")
    assert SERVICES["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD"].startswith("${GRAFANA_PASSWORD:?")


def test_every_file_and_volume_of_the_services_is_there() -> None:
    for name, service in SERVICES.items():
        for mounted in service.get("volumes", ()):
            source = mounted.partition(":")[0]
            if source.startswith("."):
                assert (ROOT / source).exists() and mounted.endswith(":ro"), f"{name}: {source}"
            else:
                assert source in COMPOSE["volumes"], f"{name}: {source}"
        assert set(service.get("secrets", ())) <= set(COMPOSE["secrets"])
    volumes = json.loads(last_stage("VOLUME")[0])
    assert {mounted.partition(":")[2] for mounted in SERVICES["bankfull"]["volumes"]} == set(volumes)


def test_prometheus_asks_the_server_with_its_key() -> None:
    (target,) = SCRAPE["static_configs"][0]["targets"]
    name, _, port = target.partition(":")
    assert port in container_ports(SERVICES[name]) and port == option(SERVICES[name]["command"], "--port")
    assert SCRAPE["metrics_path"] in served_paths() and SCRAPE["metrics_path"] not in OPEN_PATHS
    (secret,) = SERVICES["prometheus"]["secrets"]
    assert SCRAPE["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    assert COMPOSE["secrets"][secret] == {"environment": "BANKFULL_API_KEY"}
    mounts = dict(mounted.split(":")[:2] for mounted in SERVICES["prometheus"]["volumes"])
    assert f"--config.file={mounts['./deploy/prometheus.yml']}" in SERVICES["prometheus"]["command"]


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    (source,) = yaml.safe_load((PROVISIONING / "datasources/prometheus.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards/bankfull.yml").read_text())["providers"]
    name, _, port = source["url"].removeprefix("http://").partition(":")
    assert port in container_ports(SERVICES[name]) and source["type"] == "prometheus" and source["isDefault"]
    mounts = {there: here for here, there, *_ in (m.split(":") for m in SERVICES["grafana"]["volumes"])}
    dashboards = ROOT / mounts[provider["options"]["path"]]
    assert [path.name for path in dashboards.glob("*.json")] == ["bankfull.json"]
    variables = json.loads((dashboards / "bankfull.json").read_text())["templating"]["list"]
    assert {"name": "datasource", "type": "datasource", "query": source["type"]} in variables


# -- the unit


def unit() -> str:
    (found,) = re.findall(r"```ini\n(.*?)```", (ROOT / "docs/service.md").read_text(), re.DOTALL)
    return str(found)


def test_the_unit_gives_the_server_no_more_than_it_needs() -> None:
    lines = unit().splitlines()
    for wanted in (
        "DynamicUser=yes",
        "NoNewPrivileges=yes",
        "ProtectSystem=strict",
        "CapabilityBoundingSet=",
        "StateDirectory=bankfull",
        "CacheDirectory=bankfull",
    ):
        assert wanted in lines
    (start,) = (line.partition("=")[2].split() for line in lines if line.startswith("ExecStart="))
    assert start[1] == "serve"
    access_policy(Keyring(), host=option(start, "--host"))  # as it stands it needs no key


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze here")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    path = tmp_path / "bankfull.service"
    path.write_text(unit().replace("/opt/bankfull/bin/bankfull", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if "bankfull.service" in line]
    assert done.returncode == 0 and not said, done.stderr
