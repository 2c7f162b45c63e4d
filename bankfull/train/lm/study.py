"""The recall study: accuracy on associative recall against bytes of state, for every kind of mixer.

The presets `recall-*` list models of several sizes in `sweep`. Each model has a training and a directory of its own, so
an interrupted study continues.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bankfull.charts import Axis, Chart, Series
from bankfull.errors import ConfigError, ModelError
from bankfull.train.lm.run import LmReport, LmTraining, train_lm
from bankfull.train.lm.tasks import RecallTask
from bankfull.train.lm.vocabulary import word_tokenizer
from bankfull.weights.drafter_files import write_json
from bankfull.weights.hf_config import normalize_config, read_json
from bankfull.weights.presets import preset, preset_names

PREFIX = "recall-"
STUDY, CHART = "study.json", "recall.svg"


@dataclass(frozen=True, slots=True)
class StudyPoint:
    """One trained model."""

    kind: str
    layers: str
    state_bytes: int
    parameters: int
    accuracy: float
    seconds: float


@dataclass(slots=True)
class RecallStudy:
    task: dict[str, Any]
    steps: int
    batch: int
    device: str
    points: list[StudyPoint] = field(default_factory=list)

    def chart(self) -> Chart:
        kinds = list(dict.fromkeys(point.kind for point in self.points))
        return Chart(
            f"Recall of {self.task['pairs']} pairs in {self.task['length']} tokens",
            Axis("state of one sequence", log=True, unit="B"),
            Axis("accuracy", low=0.0, high=1.0),
            [Series(kind, self._line(kind)) for kind in kinds],
        )

    def _line(self, kind: str) -> list[tuple[float, float]]:
        return sorted((float(p.state_bytes), p.accuracy) for p in self.points if p.kind == kind)

    def save(self, folder: Path) -> list[Path]:
        written = write_json(folder / STUDY, asdict(self))
        (folder / CHART).write_text(self.chart().svg())
        return [written, folder / CHART]


def kinds() -> list[str]:
    return [name.removeprefix(PREFIX) for name in preset_names() if name.startswith(PREFIX)]


def configs(chosen: Sequence[str]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Kind, number and configuration of each model of the study."""
    for kind in chosen:
        folder = preset(PREFIX + kind)
        if folder is None:
            raise ConfigError(f"The recall study has no kind {kind[:40]!r}; its kinds are {', '.join(kinds())}.")
        config = normalize_config(read_json(folder / "config.json"))
        for number, layers in enumerate(config.pop("sweep")):
            yield kind, number, {**config, "layers": layers}


def run_study(
    folder: Path,
    chosen: Sequence[str],
    length: int,
    pairs: int,
    how: LmTraining,
    done: Callable[[StudyPoint], None],
) -> RecallStudy:
    """Train every model of the chosen kinds, or continue; `done` gets each point. The study is saved after each."""
    models = list(configs(chosen))
    study: RecallStudy | None = None
    for kind, number, config in models:
        task = RecallTask(config["vocab_size"], length, pairs, how.seed)
        if study is None:
            study = RecallStudy(task.facts(), how.steps, how.batch, str(how.device))
        report = train_lm(config, task, word_tokenizer(task.words()), how, folder / f"{kind}-{number}")
        if not report.finished:
            break
        study.points.append(_point(kind, config, report))
        study.save(folder)
        done(study.points[-1])
    if study is None:
        raise ConfigError("The recall study has no models; choose at least one kind.")
    return study


def _point(kind: str, config: dict[str, Any], report: LmReport) -> StudyPoint:
    return StudyPoint(
        kind, config["layers"], report.state_bytes, report.parameters, report.accuracy, round(report.seconds, 2)
    )


def read_study(path: Path) -> RecallStudy:
    """The study of a file that `save` has written."""
    record = read_json(path)
    try:
        points = [StudyPoint(**point) for point in record.pop("points")]
        return RecallStudy(**record, points=points)
    except (KeyError, TypeError) as error:
        reason = json.dumps(str(error))[:80]
        raise ModelError(
            f"{path} is not a recall study ({reason}); write it with `bankfull train recall-study`."
        ) from None
