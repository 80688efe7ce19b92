"""Every command in the README works, in the order in which a reader types them."""

import json
import os
import random
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pydantic import BaseModel

ROOT = Path(__file__).parents[1]
FLEET, STORE = 8, 4
"""So many ports each wants in a row."""
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def free_ports(count: int) -> int:
    """The first of ``count`` ports in a row that nobody listens on, below the ephemeral ones."""
    # Other tests may look for some in the same moment.
    for base in random.sample(range(21000, 32000, count), 100):
        sockets = [socket.socket() for _ in range(count)]
        try:
            for place, each in enumerate(sockets):
                each.bind(("127.0.0.1", base + place))
        except OSError:
            continue
        finally:
            for each in sockets:
                each.close()
        return base
    raise AssertionError("no free ports")


@pytest.fixture
def place(tmp_path):
    """A copy of what a reader has, and an environment in which genpipe is on the path."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    base = free_ports(FLEET + STORE)
    environment = dict(os.environ)
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    environment["GENPIPE_FLEET_PORT"] = str(base)
    environment["GENPIPE_STORE_PORT"] = str(base + FLEET)
    yield tmp_path, base, environment
    for what in ("fleet", "store"):
        if (tmp_path / "runs" / what / "pid").exists():
            subprocess.run([f"scripts/stop_{what}"], cwd=tmp_path, env=environment, timeout=30)


def typed(command: str, base: int) -> str:
    """A command with the ports that are free here."""
    return command.replace("30000-30007", f"{base}-{base + 7}").replace(":8333", f":{base + FLEET}")


@pytest.mark.slow
def test_every_command_can_be_typed_one_after_the_other(place):
    folder, base, environment = place
    said = {}
    for block in blocks("sh"):
        # What goes on in the background is the whole block's matter.
        for command in [block.strip()] if " &\n" in block else block.strip().splitlines():
            if command.startswith("make "):
                # The targets run these very tests; that they are there is all that can be seen from here.
                done = subprocess.run([*command.split(), "-n"], cwd=ROOT, capture_output=True, timeout=60)
            elif command.startswith(". "):
                continue
            elif command.startswith("export "):
                environment |= dict(word.split("=", 1) for word in shlex.split(command)[1:])
                continue
            else:
                with open(folder / "said", "w+b") as out:
                    done = subprocess.run(
                        ["bash", "-ec", typed(command, base)],
                        cwd=folder,
                        env=environment,
                        stdout=out,
                        stderr=out,
                        timeout=90,
                    )
                said[command] = (folder / "said").read_text(encoding="utf-8")

            assert done.returncode == 0, (command, said.get(command))

    assert "800 records" in next(text for command, text in said.items() if "genpipe check" in command)
    runs = [text for command, text in said.items() if command.startswith("genpipe run")]
    assert "8/8" in next(text for command, text in said.items() if "genpipe limit" in command)
    assert "800 of 800 prompts answered" in runs[0]
    assert "800 of 800" in said["genpipe status runs/first"]
    assert '"completed": 800' in said["genpipe status runs/first --json"]
    # In S3, and gone on from there alone, which asks nothing.
    assert "800 of 800 prompts answered" in runs[-1]
    assert "resuming run" in runs[-1]
    assert "800 of 800" in next(text for command, text in said.items() if "status s3://" in command)
    assert (folder / "all.jsonl").read_text(encoding="utf-8").count("\n") == 800
    # A conversation, and what trainers take.
    (talk,) = (folder / "turns-sharegpt.jsonl").read_text(encoding="utf-8").splitlines()
    roles = [message["role"] for message in json.loads(talk)["conversations"]]
    assert roles == ["user", "assistant"] * 2
    answers = (folder / "answers.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    flags = [json.loads(line)["flags"] for line in answers]
    good = sum(not {"cut", "empty", "looping"}.intersection(each) for each in flags)
    assert 0 < good < 800 == len(flags)
    assert pq.read_table(folder / "train.parquet").num_rows == good
    assert (folder / "train-sharegpt.jsonl").read_text(encoding="utf-8").count("\n") == 800


@pytest.mark.slow
def test_the_second_time_the_same_command_asks_nothing(place):
    folder, base, environment = place
    lines = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("genpipe run")]
    (run,) = {line for line in lines if lines.count(line) == 2 and "--s3" not in line}
    (folder / "prompts.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n', encoding="utf-8")
    subprocess.run(["scripts/start_fleet", "8"], cwd=folder, env=environment, timeout=30, check=True)
    for _ in range(2):
        subprocess.run(["bash", "-ec", typed(run, base)], cwd=folder, env=environment, timeout=60, check=True)
    subprocess.run(["scripts/stop_fleet"], cwd=folder, env=environment, timeout=30, check=True)
    asked = (folder / "runs" / "fleet" / "requests.jsonl").read_text(encoding="utf-8")

    assert asked.count('"/v1/chat/completions"') == 2


def test_every_setting_of_the_example_config_is_known():
    from genpipe import config

    for path in (ROOT / "configs").glob("*.toml"):
        settings = config.load(path)

        assert len(settings.servers) >= 1


def test_the_example_config_shows_every_section_with_its_defaults():
    from genpipe import config

    shown = config.load(ROOT / "configs" / "example.toml")
    plain = config.Settings()

    for section in ("start", "s3", "retry", "guards"):
        assert getattr(shown, section) == getattr(plain, section)
    text = (ROOT / "configs" / "example.toml").read_text(encoding="utf-8")
    for name, field in config.Settings.model_fields.items():
        assert f"[{name}" in text
        model = config.ServerConfig if name == "servers" else field.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)
        for key in model.model_fields:
            assert re.search(rf"^(# )?\[?({name}\.)?{key}\b", text, re.MULTILINE), (name, key)
