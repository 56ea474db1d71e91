"""Files of questions and answers: their forms, the order in which rows come, and what is said about bad ones."""

import json

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_embodied.config import DataConfig
from rlinf_embodied.data.files import FileProblems
from rlinf_embodied.data.problems import ProblemSource, Split, split_of
from rlinf_embodied.errors import DataError


def write(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def problems_of(files: dict[str, object], seed: int = 0, **columns: object) -> FileProblems:
    data = DataConfig(**columns)
    data.files = {name: str(file) for name, file in files.items()}
    return FileProblems(data, seed)


def rows_of(count: int, answer: str = "{}") -> list[dict[str, object]]:
    return [{"question": f"What is {i} + 0?", "answer": answer.format(i)} for i in range(count)]


def test_gsm8k_answers_are_taken_apart(tmp_path):
    answer = "She sold 48/2 = <<48/2=24>>24 clips in May.\nThat is 48+24 = <<48+24=72>>72 in all.\n#### 72"
    file = write(tmp_path / "gsm8k.jsonl", [{"question": " How many clips? ", "answer": answer}])
    (problem,) = problems_of({"train": file}).batch(Split.train, 0, 1)
    assert problem.question == "How many clips?"
    assert problem.answer == "72"
    assert problem.solution == "She sold 48/2 = 24 clips in May.\nThat is 48+24 = 72 in all."
    assert (problem.family, problem.level) == ("text", "gsm8k")


def test_plain_answers_other_columns_and_blank_lines(tmp_path):
    file = tmp_path / "own.jsonl"
    file.write_bytes(
        b'\xef\xbb\xbf{"q": "a?", "a": 5, "more": [1]}\r\n\r\n{"q": "b\xe2\x80\xa8b?", "a": "\\\\frac{1}{2}"}'
    )
    source = problems_of({"test": file}, question_column="q", answer_column="a")
    problems = source.batch(Split.test, 0, 2)
    assert [(p.question, p.answer, p.solution) for p in problems] == [
        ("a?", "5", None),
        ("b\u2028b?", "\\frac{1}{2}", None),
    ]


# ------------------------------------------------------------------------------------------------- published schemas
USER, ASSISTANT = {"role": "user"}, {"role": "assistant"}
DAPO = [  # the columns of DAPO-Math-17k; made up
    {
        "data_source": "math_dapo",
        "prompt": [USER | {"content": f"Solve it. Put the answer after 'Answer:'.\n\nWhat is {k} + 1?"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(k + 1), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"id-{k}", "level": k},
    }
    for k in range(4)
]
EARLIER = [{"role": "system", "content": "Short."}, USER | {"content": "1+1?"}, ASSISTANT | {"content": "2"}]
MESSAGES = [
    {"messages": [*EARLIER, USER | {"content": f"And {k}+1?"}, ASSISTANT | {"content": f"One more.\n#### {k + 1}"}]}
    for k in range(3)
]


def written(tmp_path, suffix: str, rows: list) -> dict[str, str]:
    file = tmp_path / f"rows.{suffix}"
    if suffix == "jsonl":
        write(file, rows)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return {"test": str(file)}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_gsm8k_dapo_and_chats_are_read(tmp_path, suffix):
    source = problems_of(written(tmp_path, suffix, [{"question": "a?", "answer": "One.\n#### 1"}]))
    assert [(p.question, p.answer, p.solution) for p in source.batch(Split.test, 0, 1)] == [("a?", "1", "One.")]
    names = {"question_column": "prompt", "answer_column": "reward_model.ground_truth", "columns": ["extra_info.index"]}
    (first, *_) = FileProblems(DataConfig(files=written(tmp_path, suffix, DAPO), **names), 0).batch(Split.test, 0, 4)
    assert first.question == DAPO[0]["prompt"][0]["content"]
    assert (first.answer, dict(first.columns), first.history) == ("1", {"extra_info.index": "id-0"}, ())
    both = {"question_column": "messages", "answer_column": "messages"}
    last = problems_of(written(tmp_path, suffix, MESSAGES), **both).batch(Split.test, 2, 1)[0]
    assert (last.question, last.answer, last.solution) == ("And 2+1?", "3", "One more.")
    assert last.history == (("system", "Short."), ("user", "1+1?"), ("assistant", "2"))


@pytest.mark.parametrize(
    ("where", "kept"),
    [
        ({"data_source": "math_dapo"}, 4),
        ({"reward_model.ground_truth": ["1", "4", "9"]}, 2),
        ({"extra_info.level": {"min": 1, "max": 2}, "ability": "MATH"}, 2),
        ({"extra_info.level": {"min": 3}}, 1),
    ],
)
def test_rows_are_chosen_by_a_field(tmp_path, where, kept):
    names = {"question_column": "prompt", "answer_column": "reward_model.ground_truth"}
    data = DataConfig(files=written(tmp_path, "parquet", DAPO), where=where, **names)
    assert FileProblems(data, 0).size(Split.test) == kept


def test_bad_chats_and_filters_are_refused(tmp_path):
    files = written(tmp_path, "jsonl", MESSAGES)
    with pytest.raises(DataError, match=r"data\.where is .*none of the 3 rows"):
        FileProblems(DataConfig(files=files, where={"messages": 1}, question_column="messages"), 0)
    with pytest.raises(DataError, match=r"data\.answer_column is 'reward\.x', but .* has only 'messages'"):
        problems_of(files, question_column="messages", answer_column="reward.x")
    files = written(tmp_path, "parquet", [{"q": [{"role": "tool", "content": "x"}], "a": "1"}])
    with pytest.raises(DataError, match=r"row 1: 'q' has no message of a user at its end"):
        problems_of(files, question_column="q", answer_column="a")
    with pytest.raises(DataError, match=r"row 1: 'prompt' does not end with the assistant's answer"):
        problems_of(written(tmp_path, "parquet", DAPO), question_column="prompt", answer_column="prompt")
    (tmp_path / "rows.parquet").write_text("no parquet")
    with pytest.raises(DataError, match=r"rows\.parquet is no parquet file"):
        problems_of({"test": tmp_path / "rows.parquet"})


@given(size=st.integers(1, 30), seed=st.integers(0, 2**31 - 1), start=st.integers(0, 200), count=st.integers(0, 70))
def test_each_epoch_is_a_permutation_and_batches_are_windows_of_one_stream(tmp_path_factory, size, seed, start, count):
    file = write(tmp_path_factory.mktemp("data") / "train.jsonl", rows_of(size))
    source: ProblemSource = problems_of({"train": file}, seed)
    stream = source.batch(Split.train, 0, start + count)
    assert stream[start:] == source.batch(Split.train, start, count)
    for epoch in range(len(stream) // size):
        answers = [int(p.answer) for p in stream[epoch * size : (epoch + 1) * size]]
        assert sorted(answers) == list(range(size))
    assert len({p.id for p in stream}) == len(stream)


def test_held_out_rows_come_in_file_order_and_no_more_than_there_are(tmp_path):
    files = {"train": write(tmp_path / "a.jsonl", rows_of(3)), "test": tmp_path / "b.jsonl"}
    write(tmp_path / "b.jsonl", [{"question": f"{i}?", "answer": str(i)} for i in range(4)])
    source = problems_of(files)
    assert [p.answer for p in source.batch(Split.test, 0, 4)] == ["0", "1", "2", "3"]
    assert [source.size(split) for split in (Split.train, Split.validation, Split.test)] == [3, 0, 4]
    with pytest.raises(DataError, match=r"b\.jsonl is given for the split 'test', which has 4 questions, but 5 are"):
        source.batch(Split.test, 2, 3)
    with pytest.raises(DataError, match="no file is given for the split 'validation', which has 0"):
        source.batch(Split.validation, 0, 1)


def test_one_file_is_split_by_a_hash_of_the_question(tmp_path):
    source = problems_of({"all": write(tmp_path / "all.jsonl", rows_of(400))})
    parts = {split: source.batch(split, 0, source.size(split)) for split in Split}
    assert sum(map(len, parts.values())) == 400
    assert all(split_of(p.question) is split for split, part in parts.items() for p in part)
    assert len(parts[Split.train]) > len(parts[Split.test]) > len(parts[Split.validation]) > 0


def test_a_question_in_two_splits_is_refused(tmp_path):
    files = {"train": write(tmp_path / "a.jsonl", rows_of(3)), "test": write(tmp_path / "b.jsonl", rows_of(1))}
    with pytest.raises(DataError, match=r"b\.jsonl: the question 'What is 0 \+ 0\?' is also in .*a\.jsonl"):
        problems_of(files)


GOOD = '{"question": "a?", "answer": "1"}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"has no rows"),
        ("\n \n", r"has no rows"),
        (GOOD + "{'question': 1}\n", r"line 2 is not JSON"),
        (GOOD + "\n" + '{"question": "b?"', r"line 3 is not JSON"),
        (GOOD + "[" * 100_000, r"line 2 is not JSON"),
        (GOOD + '["b?", "1"]', r"line 2 is a list, but each line must be one JSON object"),
        ('{"question": "a?", "solution": "1", "id": 3}', r"data\.answer_column is 'answer', but .*'solution', 'id'"),
        ('{"prompt": "a?", "answer": "1"}', r"data\.question_column is 'question', but .*'prompt', 'answer'"),
        (GOOD + '{"question": "a?", "answer": " "}', r"line 2: 'answer' is ' '"),
        (GOOD + '{"question": "a?", "answer": "worked ####  "}', r"line 2: its answer is empty"),
        (GOOD + '{"question": "", "answer": "1"}', r"line 2: 'question' is ''"),
        ('{"question": "a?", "answer": null}', r"line 1: 'answer' is None, but it must be a text, a number or a chat"),
        ('{"question": "a?", "answer": true}', r"line 1: 'answer' is True"),
        ('{"question": ["a?"], "answer": "1"}', r"line 1: 'question' is \['a\?'\]"),
        (GOOD + r'{"question": "\ud83d?", "answer": "1"}', r"line 2: 'question' is '\\ud83d\?', .*correct or remove"),
    ],
)
def test_a_bad_file_names_place_rule_and_action(tmp_path, content, message):
    file = tmp_path / "bad.jsonl"
    file.write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        problems_of({"all": file})
    assert str(file) in str(caught.value)
