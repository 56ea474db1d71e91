"""Questions and answers from JSON Lines files, for example {"question": "...", "answer": "... #### 42"}.

An answer with "####" is split as GSM8K writes it: worked text before the mark, the answer after it, and notes for
a calculator (<<48/2=24>>) left out.  Training goes through the rows epoch by epoch, each in a separate order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlinf_embodied.data.problems import Problem, Split, problem_id, split_of
from rlinf_embodied.errors import DataError
from rlinf_embodied.randomness import permutation

_CALCULATION = re.compile(r"<<[^<>]*>>")
_MARK = "####"


@dataclass(frozen=True, slots=True)
class _Row:
    question: str
    answer: str
    solution: str | None
    columns: dict[str, object]


class JsonlProblems:
    """Streams of the rows of files; training repeats them without end, held-out rows come once, in file order.

    Position i of training is row permutation(seed, epoch)[i mod n] with epoch = i // n.  Its id is its position, so
    that a question met again in a later epoch, or at the border of two epochs, gets other noise.
    """

    def __init__(
        self,
        files: str | Path | Mapping[Split, str | Path],
        seed: int,
        *,
        question_column: str = "question",
        answer_column: str = "answer",
        columns: Sequence[str] = (),
    ) -> None:
        """Reads all files.

        Args:
            files: one file, split by a hash of the question; or a file per split.
            seed: of the order of training.
            question_column: key of the question.
            answer_column: key of the answer.
            columns: further keys, whose values (any JSON) stand in Problem.columns.

        Raises:
            DataError: a file is missing or empty, a line cannot be used, or a question is in two splits.
        """
        self._seed, self._kept = seed, (-1, list[int]())
        read = lambda file: _rows(Path(file).expanduser(), question_column, answer_column, columns)  # noqa: E731
        if isinstance(files, Mapping):
            self._names = {split: str(file) for split, file in files.items()}
            self._rows = {split: read(file) for split, file in files.items()}
            self._require_disjoint()
        else:
            rows = read(files)
            self._names = dict.fromkeys(Split, str(files))
            self._rows = {split: [row for row in rows if split_of(row.question) is split] for split in Split}

    def size(self, split: Split) -> int:
        """Returns the number of rows of a split; 0 where it has no file."""
        return len(self._rows.get(split, ()))

    def batch(self, split: Split, start: int, count: int) -> list[Problem]:
        """Returns the problems at positions start .. start + count - 1; see ProblemSource.

        Raises:
            DataError: the split has no rows, or a held-out one fewer than asked for.
        """
        size = self.size(split)
        if not size:
            named = f"{self._names[split]} has no question" if split in self._names else "no file is given"
            raise DataError(f"{named} for the split {split.value!r}: give a file for it in data.files")
        if split is not Split.train and start + count > size:
            raise DataError(
                f"{self._names[split]}: {start + count} problems of the split {split.value!r} are asked for, but it "
                f"has {size}: ask for fewer"
            )
        return [self._problem(split, position) for position in range(start, start + count)]

    def _problem(self, split: Split, position: int) -> Problem:
        rows = self._rows[split]
        epoch, slot = divmod(position, len(rows))
        row = rows[self._order(epoch)[slot] if split is Split.train else slot]
        name = Path(self._names[split]).stem
        identity = problem_id(split, position)
        return Problem(identity, row.question, row.answer, row.solution, "text", name, columns=row.columns)

    def _order(self, epoch: int) -> list[int]:
        """Row numbers of an epoch, kept until another epoch is asked for."""
        if self._kept[0] != epoch:
            order = permutation(self._seed, "data/order", epoch, size=len(self._rows[Split.train]))
            self._kept = epoch, order.tolist()
        return self._kept[1]

    def _require_disjoint(self) -> None:
        """Checks that what is measured was not trained on."""
        seen: dict[str, Split] = {}
        for split, rows in self._rows.items():
            for row in rows:
                if seen.setdefault(row.question, split) is not split:
                    raise DataError(
                        f"{self._names[split]}: the question {row.question[:80]!r} is also in "
                        f"{self._names[seen[row.question]]}, but splits must be disjoint: remove it from one of them"
                    )


def _rows(file: Path, question_column: str, answer_column: str, columns: Sequence[str]) -> list[_Row]:
    try:
        lines = file.read_bytes().splitlines()  # bytes: text would also be split at U+2028 and the like
    except OSError as error:
        raise DataError(
            f"data.files names {str(file)!r}, which cannot be read ({error.strerror}): correct it"
        ) from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            rows.append(_row(line, f"{file}, line {number}", question_column, answer_column, columns))
    if not rows:
        raise DataError(f"data.files names {str(file)!r}, but it has no rows: give one JSON object per line")
    return rows


def _row(line: bytes, place: str, question_column: str, answer_column: str, columns: Sequence[str]) -> _Row:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} is not JSON ({error}): each line must be one JSON object") from error
    if not isinstance(record, dict):
        raise DataError(f"{place} is a {type(record).__name__}, but each line must be one JSON object: correct it")
    question = _text(record, question_column, "data.question_column", place)
    answer = _text(record, answer_column, "data.answer_column", place)
    worked, mark, final = answer.rpartition(_MARK)
    if mark and not final.strip():
        raise DataError(f"{place}: its answer is empty, so that nothing could be right: remove or complete it")
    solution = _CALCULATION.sub("", worked).strip() or None
    others = {name: _value(record, name, "data.columns", place) for name in columns}
    return _Row(question, final.strip() if mark else answer, solution, others)


def _value(record: dict[str, object], name: str, path: str, place: str) -> object:
    if name not in record:
        raise DataError(f"{path} is {name!r}, but {place} has only {', '.join(map(repr, record))}: choose one of those")
    return record[name]


def _text(record: dict[str, object], name: str, path: str, place: str) -> str:
    """Returns a column as stripped text; numbers count as text."""
    value = _value(record, name, path, place)
    text = str(value).strip()
    valid = isinstance(value, str | int | float) and not isinstance(value, bool)
    # half of a surrogate pair, which JSON can escape, is no character, and no tokenizer takes it
    if not valid or not text or any("\ud800" <= character <= "\udfff" for character in text):
        raise DataError(
            f"{place}: {name!r} is {value!r}, but it must be a text or a number: correct or remove the line"
        )
    return text
