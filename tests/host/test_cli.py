"""llama-cli: the server's code inside one process, with a chat template and no port."""

import host
from host import DEFAULT


def test_one_turn(programs, tmp_path):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(host.document(1500, "35087")
                      + "\n\nWhich serial number is printed on this copy? Answer with the number.")
    result = programs.run("llama-cli", "-c", 2048, "-n", 24, "--temp", 0, "--single-turn",
                          "--simple-io", "-f", prompt, cache=DEFAULT,
                          KVTAMP_STATS=tmp_path / "stats.json")
    # The prompt is shown too: what counts comes after it.
    answer = result.out.rpartition("Answer with the number.")[2]
    assert "35087" in answer, result.out
    assert (tmp_path / "stats.json").exists()
