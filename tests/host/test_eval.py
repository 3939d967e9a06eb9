"""kvtamp eval on a real model: what its tasks ask, what it says of the answers, and how it goes on."""

import csv
import io
import json
import random
import re
import signal
import subprocess
import time

import pytest
import sacrebleu

import host

NEEDLE = ["--task", "needle", "--lengths", 384, "--depths", "0,60", "--cache", "k8v8"]


def command(programs, *args):
    return [programs.command, "eval", "-m", programs.model, "-f", host.GPL, "-t", host.THREADS, "-ub", 64,
            *args]


def evaluate(programs, *args, code=0):
    result = host.run(command(programs, "-q", "-o", "json", *args),
                      env=host.environment(programs.plugin, host.HOST, {}), limit=host.LIMIT)
    assert result.code == code, result.out + result.err
    return json.loads(result.out) if result.out else result.err


def figures(report):
    """Those that depend on nothing but what was run: not times, nor what the allocator still holds of before."""
    return {name: value for name, value in report.items()
            if "_ts" not in name and not name.startswith("kv_") and name != "stats"}


@pytest.fixture(scope="module")
def needles(programs, tmp_path_factory):
    log = tmp_path_factory.mktemp("eval") / "run.jsonl"
    return evaluate(programs, *NEEDLE, "--noise-floor", "--resume", log), log


def test_needles_are_found(needles):
    report, _ = needles
    assert report["task"] == "needle" and report["n_prompts"] == 2
    assert report["needle_accuracy_base"] == report["needle_accuracy_floor"] == 1
    assert report["needle_accuracy"] == 1 and report["needle_accuracy_se"] == 0
    assert 8 < report["kv_bpw"] < 16
    for item, depth in zip(report["items"], [0, 60]):
        assert (item["length"], item["depth"]) == (384, depth)
        number, = item["expected"]
        assert re.fullmatch(r"[1-9]\d{6}", number)
        for answer in ("answer", "answer_base", "answer_floor"):
            assert re.search(r"\d+", item[answer]).group() == number
    assert [(group["depth"], group["score"]) for group in report["groups"]] == [(0, 1), (60, 1)]


def test_a_broken_cache_is_seen(programs):
    report = evaluate(programs, *NEEDLE[:-1], "k1v1", "--cache-residual-length", 0, "--cache-n-sink", 0,
                      "--fail-if", "needle_accuracy<0.9", code=3)
    assert report["needle_accuracy"] < report["needle_accuracy_base"] == 1
    assert report["needle_accuracy_change"] == report["needle_accuracy"] - 1


def test_ruler_scores_the_share_that_was_found(programs):
    result = host.run(command(programs, "-q", "-o", "csv", "--task", "ruler", "--ruler-tasks", "multikey,multivalue",
                              "--lengths", 384, "--samples", 1, "--device", "host", "-ctk", "q8_0", "-ctv", "q8_0"),
                      env=host.environment(programs.plugin, host.HOST, {}))
    assert result.code == 0, result.err
    rows = list(csv.DictReader(io.StringIO(result.out)))
    assert [row["kind"] for row in rows] == ["multikey", "multivalue"]
    for row, n in zip(rows, [1, 4]):
        expected = json.loads(row["expected"])
        assert len(expected) == n and row["length"] == "384"
        for answer, score in [("answer", "score"), ("answer_base", "score_base")]:
            assert float(row[score]) == sum(number in row[answer] for number in expected) / n
    assert sum(float(row["score_base"]) for row in rows) > 0


def test_a_finished_run_is_not_run_again(programs, needles):
    report, log = needles
    before = log.read_text()
    assert len(before.splitlines()) == 1 + 2 * 3
    again = evaluate(programs, *NEEDLE, "--noise-floor", "--resume", log)
    assert log.read_text() == before
    assert figures(again) == figures(report)


def test_a_run_cut_short_goes_on(programs, needles, tmp_path):
    report, log = needles
    part = tmp_path / "part.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    part.write_text("".join(lines[:3]) + lines[3][:40])
    again = evaluate(programs, *NEEDLE, "--noise-floor", "--resume", part)
    assert figures(again) == figures(report)
    assert again["kv_bpw"] == pytest.approx(report["kv_bpw"], rel=0.02)
    assert len(part.read_text().splitlines()) == len(lines)


def test_a_file_of_other_settings_is_refused(programs, needles):
    _, log = needles
    before = log.read_text()
    said = evaluate(programs, *NEEDLE[:-1], "k4v4", "--resume", log, code=2)
    assert said.count("\n") == 1 and "other settings" in said and "format_k" in said
    assert log.read_text() == before


def test_ctrl_c_keeps_what_was_done(programs, tmp_path):
    log = tmp_path / "run.jsonl"
    args = command(programs, "-q", "-o", "json", "--task", "needle", "--lengths", 384, "--cache", "k8v8",
                   "--resume", log)
    process = subprocess.Popen([str(word) for word in args], text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, preexec_fn=host.die_with_parent,
                               env=host.environment(programs.plugin, host.HOST, {}))
    deadline = time.monotonic() + 120
    while not log.exists() or len(log.read_text().splitlines()) < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    report = json.loads(out)
    assert 1 <= report["n_prompts"] < 5
    assert f"interrupted: {report['n_prompts']} of 5 prompts" in err


def test_chunks_go_on_too(programs, tmp_path):
    log = tmp_path / "run.jsonl"
    args = ["-c", 256, "--cache", "k8v8", "--chunks"]
    first = evaluate(programs, *args, 1, "--resume", log)
    both = evaluate(programs, *args, 2, "--resume", log)
    assert len(log.read_text().splitlines()) == 3
    assert both["chunk_results"][0] == first["chunk_results"][0]
    assert figures(both) == figures(evaluate(programs, *args, 2))
    short = evaluate(programs, *args, 2, "--task", "ppl", "--resume", log)
    assert short["ppl"] == both["ppl"] and "kld_mean" not in short


# --- Texts that are compared ---------------------------------------------------------------------

def rouge_l(text, reference):
    """As rouge-score has it."""
    a, b = (re.findall("[a-z0-9]+", words.lower()) for words in (text, reference))
    row = [0] * (len(b) + 1)
    for word in a:
        row = next_row(row, word, b)
    return 2 * row[-1] / (len(a) + len(b)) if a and b else 0


def next_row(row, word, others):
    """Of the table of longest common subsequences."""
    out = [0]
    for j, other in enumerate(others):
        out.append(row[j] + 1 if word == other else max(row[j + 1], out[j]))
    return out


def bleu(texts, references):
    return sacrebleu.corpus_bleu(texts, [references]).score


def test_answers_are_compared_as_sacrebleu_does(programs):
    report = evaluate(programs, "--task", "generate", "--samples", 3, "--prompt-tokens", 160, "--n-predict",
                      32, "--cache", "k2v2")
    answers = [item["answer"] for item in report["items"]]
    references = [item["answer_base"] for item in report["items"]]
    assert len(answers) == 3 and all(references)
    assert report["bleu"] == pytest.approx(bleu(answers, references))
    scores = [rouge_l(*pair) for pair in zip(answers, references)]
    assert [item["rouge_l"] for item in report["items"]] == pytest.approx(scores)
    assert report["rouge_l"] == pytest.approx(sum(scores) / 3)
    for item in report["items"]:
        assert (item["first_diff"] is None) == (item["answer"] == item["answer_base"])
    equal = [item["first_diff"] is None for item in report["items"]]
    assert report["same_answers"] == pytest.approx(sum(equal) / 3)


EDGES = [
    (["the cat sat on the mat"], ["the cat sat on the mat"]),
    (["the the the the the"], ["the cat is on the mat"]),  # counts are clipped
    (["a b c d e"], ["a b c d e f g h"]),  # too short
    (["a b c d e f g h"], ["a b c d e"]),
    (["a b"], ["a b"]),  # no word of order 3 at all
    (["x y z w"], ["a b c d"]),
    ([""], ["a b c d"]),
    (["", "a b c d e"], ["a b c d", "a b c d f"]),
    (["a c b d e a b"], ["a b c d e f"]),  # smoothed twice
    (["1,000.50 (or so), 3-4; x-y: 5%"], ["1,000.50 or so, 3 - 4 x-y 5 %"]),
    (["“quoted” – dash… don't"], ["\"quoted\" - dash ... don't"]),
    (["&quot;a&amp;b&quot; &lt;c&gt; &amp;lt; d e"], ["\"a&b\" <c> < d e"]),
    (["word-\nwrap and\nlines <skipped> a b -\n"], ["wordwrap and lines a b -"]),
    (["no\u00a0break\u3000space a\u2003b\u0085c d"], ["no break space a b c d"]),
    (["日本語のテキスト、です。 a b c"], ["日本語のテキスト、です。 a b d"]),
    (["a.b,c .5 5. 6,7 ,8 -9 9- --"], ["a . b , c . 5 5 . 6,7 , 8 -9 9 - --"]),
]


def scramble(rng):
    alphabet = ["the", "cat", "3.5", "a,b", "x-y", "7-", "(z)", "&amp;", "é", "\n", "-\n", ".", "!", "\u00a0"]
    texts = [[rng.choice(alphabet) for _ in range(rng.randrange(0, 25))] for _ in range(3)]
    references = [text[:] for text in texts]
    for reference in references:
        reference.append("end")
        for _ in range(rng.randrange(0, 4)):
            reference[rng.randrange(len(reference))] = rng.choice(alphabet[:6])
    glue = rng.choice(["", " ", " "])
    return [glue.join(text) for text in texts], [" ".join(reference) for reference in references]


def test_bleu_and_rouge_at_the_edges(programs):
    rng = random.Random(7)
    cases = EDGES + [scramble(rng) for _ in range(200)]
    asked = "".join(json.dumps({"texts": texts, "references": references}) + "\n"
                    for texts, references in cases)
    result = subprocess.run([programs.command.parents[1] / "tests" / "text_score"], input=asked, text=True,
                            capture_output=True, check=True, timeout=60)
    for (texts, references), line in zip(cases, result.stdout.splitlines(), strict=True):
        ours = json.loads(line)
        assert ours["bleu"] == pytest.approx(bleu(texts, references), abs=1e-9), (texts, references)
        assert ours["rouge_l"] == pytest.approx([rouge_l(*pair) for pair in zip(texts, references)])
