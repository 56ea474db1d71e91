"""Questions and answers from JSON Lines and parquet files, for example {"question": "...", "answer": "... #### 42"}.

A column has a name or a dotted path into mappings ("reward_model.ground_truth").  It holds a text, a number or a chat,
which is a list of {"role": ..., "content": ...}: the question is then the last message of the user, and what comes
before it remains as Problem.history; the answer is the last message of the assistant.

An answer with "####" is split as GSM8K writes it: worked text before the mark, the answer after it, and notes for
a calculator (<<48/2=24>>) left out.  Training goes through the rows epoch by epoch, each in a separate order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.parquet

from rlinf_embodied.config import DataConfig
from rlinf_embodied.data.problems import Problem, Split, problem_id, split_of
from rlinf_embodied.errors import DataError
from rlinf_embodied.randomness import permutation

_CALCULATION = re.compile(r"<<[^<>]*>>")
_MARK = "####"


class FileProblems:
    """Streams of the rows of data.files; training repeats them without end, held-out rows come once, in file order.

    Position i of training is row permutation(seed, epoch)[i mod n] with epoch = i // n.  Its id is its position, so
    that a question met again in a later epoch, or at the border of two epochs, gets other noise.
    """

    def __init__(self, data: DataConfig, seed: int) -> None:
        """Reads all files: {"all": file}, split by a hash of the question, or a file per split.

        Raises:
            DataError: a file is missing or empty, a line cannot be used, or a question is in two splits.
        """
        self._seed, self._kept, self._files = seed, (-1, list[int]()), data.files
        rows = {name: _rows(file, data) for name, file in data.files.items()}
        if whole := rows.pop("all", None):
            rows = {split.value: [row for row in whole if split_of(row.question) is split] for split in Split}
        self._rows = {Split(name): found for name, found in rows.items()}
        seen: dict[str, Split] = {}
        for split, found in self._rows.items():
            for row in found:
                if (other := seen.setdefault(f"{row.history}{row.question}", split)) is not split:
                    raise DataError(
                        f"{self._files[split]}: the question {row.question[:80]!r} is also in {self._files[other]}, "
                        "but splits must be disjoint: remove it from one of them"
                    )

    def size(self, split: Split) -> int:
        """Returns the number of rows of a split; 0 where it has no file."""
        return len(self._rows.get(split, ()))

    def batch(self, split: Split, start: int, count: int) -> list[Problem]:
        """As ProblemSource; raises a DataError where the split has no rows, or a held-out one fewer than asked for."""
        size, file = self.size(split), self._files.get(split, self._files.get("all"))
        if not size or (split is not Split.train and start + count > size):
            raise DataError(
                f"{file or 'no file'} is given for the split {split.value!r}, which has {size} questions, but "
                f"{start + count} are asked for: ask for fewer, or give a larger file in data.files"
            )
        return [self._problem(split, position) for position in range(start, start + count)]

    def _problem(self, split: Split, position: int) -> Problem:
        rows = self._rows[split]
        epoch, slot = divmod(position, len(rows))
        if split is Split.train:
            if self._kept[0] != epoch:  # the order of an epoch is kept until another one is asked for
                self._kept = epoch, permutation(self._seed, "data/order", epoch, size=len(rows)).tolist()
            slot = self._kept[1][slot]
        return replace(rows[slot], id=problem_id(split, position))


def _rows(place: str, data: DataConfig) -> list[Problem]:
    """Returns the rows of a file that pass data.where."""
    file = Path(place).expanduser()
    number, rows = 0, []
    try:
        for where, record in _parquet(file, data) if file.suffix == ".parquet" else _json_lines(file):
            number += 1
            if all(_passes(_column(record, name, "where", where), wanted) for name, wanted in data.where.items()):
                rows.append(_row(record, where, file.stem, data))
    except OSError as error:
        why = error.strerror or error
        raise DataError(f"data.files names {place!r}, which cannot be read ({why}): correct it") from error
    if not number:
        raise DataError(f"data.files names {place!r}, but it has no rows: give one JSON object per line, or parquet")
    if not rows:
        raise DataError(f"data.where is {data.where}, but none of the {number} rows of {file} passes: change it")
    return rows


def _json_lines(file: Path) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yields (place, row)."""
    for number, line in enumerate(file.read_bytes().splitlines(), 1):  # text would also be split at U+2028 and the like
        place = f"{file}, line {number}"
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{place} is not JSON ({error}): each line must be one JSON object") from error
        if not isinstance(record, dict):
            raise DataError(f"{place} is a {type(record).__name__}, but each line must be one JSON object: correct it")
        yield place, record


def _parquet(file: Path, data: DataConfig) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yields (place, row) with the columns that are needed; all of them where one of these is missing."""
    try:
        table = pyarrow.parquet.ParquetFile(file)
        wanted = {data.question_column, data.answer_column, *data.columns, *data.where}
        found, known = {_top(name, table.schema_arrow.names) for name in wanted}, set(table.schema_arrow.names)
        batches = table.iter_batches(columns=sorted(found) if found <= known else None)
        rows = (record for batch in batches for record in batch.to_pylist())
        yield from ((f"{file}, row {number}", record) for number, record in enumerate(rows, 1))
    except pyarrow.ArrowException as error:
        raise DataError(f"{file} is no parquet file that can be read ({error}): write it again") from error


def _top(name: str, names: list[str]) -> str:
    """Returns the column that a name or a dotted path begins with."""
    return name if name in names else name.partition(".")[0]


def _column(record: Mapping[str, object], name: str, path: str, place: str) -> object:
    found: object = record
    for part in [name] if name in record else name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            known = ", ".join(map(repr, found)) if isinstance(found, Mapping) else "no columns"
            raise DataError(f"data.{path} is {name!r}, but {place} has only {known}: choose one of those")
        found = found[part]
    return found


def _passes(value: object, wanted: object) -> bool:
    """Returns whether a column has the value, one of the values, or lies in {min: ..., max: ...}, bounds included."""
    if isinstance(wanted, Mapping):
        number = isinstance(value, int | float)
        return number and wanted.get("min", value) <= value <= wanted.get("max", value)
    return value in wanted if isinstance(wanted, list) else value == wanted


def _row(record: Mapping[str, object], place: str, level: str, data: DataConfig) -> Problem:
    asked = _column(record, data.question_column, "question_column", place)
    chat = _chat(asked, data.question_column, place) if isinstance(asked, list) else []
    if chat and chat[-1][0] == "assistant":
        chat.pop()
    if isinstance(asked, list) and not (chat and chat[-1][0] == "user"):
        raise DataError(f"{place}: {data.question_column!r} has no message of a user at its end: correct or remove it")
    question = chat.pop()[1] if chat else _text(asked, data.question_column, place)
    given = _column(record, data.answer_column, "answer_column", place)
    said = _chat(given, data.answer_column, place)[-1:] if isinstance(given, list) else []
    if isinstance(given, list) and not (said and said[0][0] == "assistant"):
        raise DataError(f"{place}: {data.answer_column!r} does not end with the assistant's answer: add or remove it")
    answer = said[0][1] if said else _text(given, data.answer_column, place)
    worked, mark, final = answer.rpartition(_MARK)
    if mark and not final.strip():
        raise DataError(f"{place}: its answer is empty, so that nothing could be right: remove or complete it")
    solution = _CALCULATION.sub("", worked).strip() or None
    others = {name: _column(record, name, "columns", place) for name in data.columns}
    final = final.strip() if mark else answer
    return Problem(0, question, final, solution, "text", level, others, tuple(chat))


def _chat(value: list[object], name: str, place: str) -> list[tuple[str, str]]:
    """Returns the messages of a chat as (role, text)."""
    chat = []
    for message in value:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise DataError(
                f"{place}: {name!r} is {value!r}, but a chat is a list of messages with role and content: "
                "correct or remove it"
            )
        chat.append((str(message["role"]), _text(message["content"], name, place)))
    return chat


def _text(value: object, name: str, place: str) -> str:
    """Returns a column as stripped text; numbers count as text."""
    text = str(value).strip()
    valid = isinstance(value, str | int | float) and not isinstance(value, bool)
    # half of a surrogate pair, which JSON can escape, is no character, and no tokenizer takes it
    if not valid or not text or any("\ud800" <= character <= "\udfff" for character in text):
        raise DataError(
            f"{place}: {name!r} is {value!r}, but it must be a text, a number or a chat: correct or remove the row"
        )
    return text
