"""Questions and answers from JSON Lines files, for example {"question": "...", "answer": "... #### 42"}.

An answer with "####" is split as GSM8K writes it: worked text before the mark, the answer after it, and notes for
a calculator (<<48/2=24>>) left out.  Training goes through the rows epoch by epoch, each in a separate order.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

from rlinf_embodied.config import DataConfig
from rlinf_embodied.data.problems import Problem, Split, problem_id, split_of
from rlinf_embodied.errors import DataError
from rlinf_embodied.randomness import permutation

_CALCULATION = re.compile(r"<<[^<>]*>>")
_MARK = "####"


class JsonlProblems:
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
                if (other := seen.setdefault(row.question, split)) is not split:
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
    file = Path(place).expanduser()
    try:
        lines = file.read_bytes().splitlines()  # bytes: text would also be split at U+2028 and the like
    except OSError as error:
        raise DataError(f"data.files names {place!r}, which cannot be read ({error.strerror}): correct it") from error
    rows = [_row(line, f"{file}, line {k}", file.stem, data) for k, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise DataError(f"data.files names {place!r}, but it has no rows: give one JSON object per line")
    return rows


def _row(line: bytes, place: str, level: str, data: DataConfig) -> Problem:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} is not JSON ({error}): each line must be one JSON object") from error
    if not isinstance(record, dict):
        raise DataError(f"{place} is a {type(record).__name__}, but each line must be one JSON object: correct it")
    wanted = {"question_column": data.question_column, "answer_column": data.answer_column}
    for path, name in [*wanted.items(), *(("columns", name) for name in data.columns)]:
        if name not in record:
            known = ", ".join(map(repr, record))
            raise DataError(f"data.{path} is {name!r}, but {place} has only {known}: choose one of those")
    question, answer = (_text(record[name], name, place) for name in wanted.values())
    worked, mark, final = answer.rpartition(_MARK)
    if mark and not final.strip():
        raise DataError(f"{place}: its answer is empty, so that nothing could be right: remove or complete it")
    solution = _CALCULATION.sub("", worked).strip() or None
    others = {name: record[name] for name in data.columns}
    return Problem(0, question, final.strip() if mark else answer, solution, "text", level, others)


def _text(value: object, name: str, place: str) -> str:
    """Returns a column as stripped text; numbers count as text."""
    text = str(value).strip()
    valid = isinstance(value, str | int | float) and not isinstance(value, bool)
    # half of a surrogate pair, which JSON can escape, is no character, and no tokenizer takes it
    if not valid or not text or any("\ud800" <= character <= "\udfff" for character in text):
        raise DataError(
            f"{place}: {name!r} is {value!r}, but it must be a text or a number: correct or remove the line"
        )
    return text
