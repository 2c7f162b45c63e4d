"""Prompts for the text that a model writes about itself: from a file, or made from the tasks and topics below.

These were written for training only. No benchmark uses them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from bankfull.errors import ConfigError

LARGEST_FILE = 256 << 20
LONGEST_PROMPT = 1 << 16
"""Characters of a prompt in a file."""

TASKS = (
    "Explain {topic} to a ten-year-old.",
    "Explain {topic} step by step to a beginner.",
    "Write a short introduction to {topic}.",
    "What are three common mistakes people make with {topic}?",
    "List five facts about {topic}.",
    "Give me a numbered checklist for {topic}.",
    "Write a friendly email to a colleague about {topic}.",
    "Write a formal letter of complaint about {topic}.",
    "Write a product description related to {topic}.",
    "Write a short story that begins with {topic}.",
    "Write a four-line poem about {topic}.",
    "Write a dialogue between two friends who discuss {topic}.",
    "What are the advantages and disadvantages of {topic}?",
    "Compare {topic} fifty years ago and today.",
    "Summarize what everyone should know about {topic} in two sentences.",
    "Answer as an expert: why does {topic} matter?",
    "Write three quiz questions about {topic}, each with its answer.",
    "Write a table in Markdown that compares aspects of {topic}.",
    "Write a JSON object that describes {topic} with five fields.",
    "Make a glossary of six terms that belong to {topic}.",
    "Write a news report of one paragraph about {topic}.",
    "Give advice to someone who is worried about {topic}.",
    "Describe {topic} without using any technical terms.",
    "Write a speech of one minute about {topic}.",
    "What questions should I ask before I decide anything about {topic}?",
    "Write a plan for one week that deals with {topic}.",
    "Rewrite this sentence in three ways: People often misunderstand {topic}.",
    "Correct the grammar: me and him was talking on {topic} yesterday and he do not agree.",
    "Translate into French: We would like to learn more about {topic}.",
    "Translate into Spanish: The book about {topic} is on the table.",
    "Write a Python function that could be part of a program about {topic}, with a docstring.",
    "Write a Python class that stores records about {topic}.",
    "Write an SQL query over an imagined database about {topic}, and explain it.",
    "Write a shell script that collects files about {topic} in one folder.",
    "Write a small HTML page about {topic}.",
    "Write unit tests for an imagined module about {topic}.",
    "Solve and show your steps: a course about {topic} costs 12 dollars a week; what do 9 weeks cost?",
    "Estimate with rough numbers how many people deal with {topic} each day.",
    "Is this statement true or false, and why? Nobody needs {topic} any more.",
    "Continue this text: When we arrived, the talk had already turned to {topic}, and",
    "Give three titles for an article about {topic}.",
    "Write a haiku and a limerick about {topic}.",
    "Write meeting notes of a team that discussed {topic}.",
    "Write instructions for a game that teaches {topic}.",
    "Write a recipe-style text whose subject is {topic}.",
    "Name the tools that one needs for {topic}, and what each is for.",
    "Describe a typical day of a person who works with {topic}.",
    "Write a review with three stars out of five about {topic}.",
)
TOPICS = (
    "the water cycle",
    "electric cars",
    "sorting algorithms",
    "growing tomatoes",
    "the French Revolution",
    "personal budgets",
    "sleep",
    "learning the piano",
    "black holes",
    "remote work",
    "bread baking",
    "the immune system",
    "public libraries",
    "chess openings",
    "solar panels",
    "first aid",
    "ancient Rome",
    "password security",
    "bird migration",
    "photography at night",
    "job interviews",
    "volcanoes",
    "recycling",
    "probability",
    "running a marathon",
    "coffee",
    "the printing press",
    "unit tests",
    "ocean currents",
    "meditation",
    "bicycle repair",
    "the stock market",
    "vaccines",
    "city traffic",
    "fairy tales",
    "linear equations",
    "houseplants",
    "jazz",
    "earthquakes",
    "time management",
    "the human heart",
    "web browsers",
    "moving to a new city",
    "bridges",
    "the Silk Road",
    "knitting",
    "weather forecasts",
    "databases",
    "healthy breakfasts",
    "the Moon",
    "public speaking",
    "dogs",
    "insurance",
    "the ozone layer",
    "board games",
    "neural networks",
    "camping",
    "Shakespeare",
    "fractions",
    "airports",
    "bees",
    "operating systems",
    "friendship",
    "the history of writing",
)


def own_prompts(count: int, seed: int) -> list[str]:
    """Tasks about topics in a seeded order. All pairs occur before one occurs again."""
    pairs = [(task, topic) for task in TASKS for topic in TOPICS]
    random.Random(seed).shuffle(pairs)
    chosen = (pairs[i % len(pairs)] for i in range(count))
    return [task.format(topic=topic) for task, topic in chosen]


def read_prompts(path: Path) -> list[str]:
    """One prompt per line; in a .jsonl file, objects with a "prompt"."""
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise ConfigError(f"{path} is larger than {LARGEST_FILE >> 20} MiB; give fewer prompts.")
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"The prompts in {path} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}); convert it first.") from None
    prompts = [
        _prompt_of(path, number, line) if path.suffix == ".jsonl" else line
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not prompts:
        raise ConfigError(f"{path} holds no prompts; give one per line.")
    if any(len(prompt) > LONGEST_PROMPT for prompt in prompts):
        raise ConfigError(f"{path} holds a prompt of more than {LONGEST_PROMPT} characters; shorten it.")
    return prompts


def _prompt_of(path: Path, number: int, line: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    prompt = record.get("prompt") if isinstance(record, dict) else None
    if not isinstance(prompt, str) or not prompt.strip():
        raise ConfigError(f'Line {number} of {path} is not a JSON object with a "prompt"; correct it, or delete it.')
    return prompt


def repeated(prompts: Sequence[str], count: int) -> list[str]:
    """`count` prompts: the given ones in turns."""
    return [prompts[i % len(prompts)] for i in range(count)]
