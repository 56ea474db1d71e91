"""Questions and answers from JSON Lines and parquet files, for example {"question": "...", "answer": "... #### 42"}.

A column has a name or a dotted path into mappings ("reward_model.ground_truth").  It holds a text, a number or a chat,
which is a list of {"role": ..., "content": ...}.  The question of a chat is the last message of the user, and earlier
messages become Problem.history; the answer of a chat is the last message of the assistant.

An answer with "####" is split as in GSM8K: the solution before the mark, without notes for a calculator (<<48/2=24>>),
and the answer after it.  Training passes over the rows in epochs, each in a different order.
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
    """Streams of the rows of data.files; training repeats them endlessly, held-out rows come once, in file order.

    Position i of training is row permutation(seed, epoch)[i mod n] with epoch = i // n.  Its id is its position, so
    a question that is repeated in a later epoch, or at the border of two epochs, gets different noise.
    """

    def __init__(self, data: DataConfig, seed: int) -> None:
        """Reads all files: {"all": file}, which is split by a hash of the question, or a file per split.

        Raises:
            DataError: a file is missing or empty, a line cannot be used, or a question is in two splits.
        """
        self._seed, self._order, self._files = seed, (-1, list[int]()), data.files  # _order: an epoch, and its order
        rows = {name: _rows(file, data) for name, file in data.files.items()}
        if whole := rows.pop("all", None):
            rows = {split.value: [row for row in whole if split_of(row.question) is split] for split in Split}
        self._rows = {Split(name): problems for name, problems in rows.items()}
        split_of_question: dict[str, Split] = {}
        for split, problems in self._rows.items():
            for row in problems:
                if (other := split_of_question.setdefault(f"{row.history}{row.question}", split)) is not split:
                    raise DataError(
                        f"{self._files[split]}: the question {row.question[:80]!r} is also in {self._files[other]}, "
                        "but splits must be disjoint: remove it from one of them"
                    )

    def size(self, split: Split) -> int:
        """Returns the number of rows of a split; 0 if it has no file."""
        return len(self._rows.get(split, ()))

    def batch(self, split: Split, start: int, count: int) -> list[Problem]:
        """As ProblemSource; raises DataError if the split has no rows, or a held-out split fewer than requested."""
        size, file = self.size(split), self._files.get(split, self._files.get("all"))
        if not size or (split is not Split.train and start + count > size):
            raise DataError(
                f"{file or 'no file'} is given for the split {split.value!r}, which has {size} questions, but "
                f"{start + count} are needed: use fewer, or give a larger file in data.files"
            )
        return [self._problem(split, position) for position in range(start, start + count)]

    def _problem(self, split: Split, position: int) -> Problem:
        rows = self._rows[split]
        epoch, slot = divmod(position, len(rows))
        if split is Split.train:
            if self._order[0] != epoch:
                self._order = epoch, permutation(self._seed, "data/order", epoch, size=len(rows)).tolist()
            slot = self._order[1][slot]
        return replace(rows[slot], id=problem_id(split, position))


def _rows(path: str, data: DataConfig) -> list[Problem]:
    """Returns the rows of a file that pass data.where."""
    file = Path(path).expanduser()
    number, rows = 0, []
    try:
        for place, record in _parquet(file, data) if file.suffix == ".parquet" else _json_lines(file):
            number += 1
            if all(_passes(_column(record, name, "where", place), wanted) for name, wanted in data.where.items()):
                rows.append(_row(record, place, file.stem, data))
    except OSError as error:
        why = error.strerror or error
        raise DataError(f"data.files names {path!r}, which cannot be read ({why}): correct it") from error
    if not number:
        raise DataError(f"data.files names {path!r}, but it has no rows: give one JSON object per line, or parquet")
    if not rows:
        raise DataError(f"data.where is {data.where}, but none of the {number} rows of {file} passes: change it")
    return rows


def _json_lines(file: Path) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yields rows, each with its place for error messages."""
    for number, line in enumerate(file.read_bytes().splitlines(), 1):  # str.splitlines would also split at U+2028
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
    """Yields rows with the needed columns (all, if a needed one is missing), each with its place for error messages."""
    try:
        table = pyarrow.parquet.ParquetFile(file)
        wanted = {data.question_column, data.answer_column, *data.columns, *data.where}
        columns, known = {_top(name, table.schema_arrow.names) for name in wanted}, set(table.schema_arrow.names)
        batches = table.iter_batches(columns=sorted(columns) if columns <= known else None)
        rows = (record for batch in batches for record in batch.to_pylist())
        yield from ((f"{file}, row {number}", record) for number, record in enumerate(rows, 1))
    except pyarrow.ArrowException as error:
        raise DataError(f"{file} is no parquet file that can be read ({error}): write it again") from error


def _top(name: str, names: list[str]) -> str:
    """Returns the top-level column of a name or a dotted path."""
    return name if name in names else name.partition(".")[0]


def _column(record: Mapping[str, object], name: str, path: str, place: str) -> object:
    value: object = record
    for part in [name] if name in record else name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            known = ", ".join(map(repr, value)) if isinstance(value, Mapping) else "no columns"
            raise DataError(f"data.{path} is {name!r}, but {place} has only {known}: choose one of those")
        value = value[part]
    return value


def _passes(value: object, wanted: object) -> bool:
    """Returns whether a value equals `wanted`, is in the list `wanted`, or lies in {min: ..., max: ...}, inclusive."""
    if isinstance(wanted, Mapping):
        number = isinstance(value, int | float)
        return number and wanted.get("min", value) <= value <= wanted.get("max", value)
    return value in wanted if isinstance(wanted, list) else value == wanted


def _row(record: Mapping[str, object], place: str, level: str, data: DataConfig) -> Problem:
    chat = _chat(_column(record, data.question_column, "question_column", place), "user", data.question_column, place)
    if chat and chat[-1][0] == "assistant":
        chat.pop()
    if not chat or chat[-1][0] != "user":
        raise DataError(f"{place}: {data.question_column!r} has no message of a user at its end: correct or remove it")
    _, question = chat.pop()
    reply = _chat(_column(record, data.answer_column, "answer_column", place), "assistant", data.answer_column, place)
    if not reply or reply[-1][0] != "assistant":
        raise DataError(f"{place}: {data.answer_column!r} does not end with the assistant's answer: add or remove it")
    worked, _, final = reply[-1][1].rpartition(_MARK)
    if not final.strip():
        raise DataError(f"{place}: its answer is empty, so no completion could be correct: remove or complete it")
    solution = _CALCULATION.sub("", worked).strip() or None
    columns = {name: _column(record, name, "columns", place) for name in data.columns}
    return Problem(0, question, final.strip(), solution, "text", level, columns, tuple(chat))


def _chat(value: object, role: str, name: str, place: str) -> list[tuple[str, str]]:
    """Returns the messages of a chat as (role, text); a text or a number is one message of `role`."""
    if not isinstance(value, list):
        return [(role, _text(value, name, place))]
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
    # JSON can escape half of a surrogate pair, which is not a character and which no tokenizer accepts
    if not valid or not text or any("\ud800" <= character <= "\udfff" for character in text):
        raise DataError(
            f"{place}: {name!r} is {value!r}, but it must be a text, a number or a chat: correct or remove the row"
        )
    return text
