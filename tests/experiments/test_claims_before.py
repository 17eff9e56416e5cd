"""The page of claims before and after is that of its two sources, and leaves no claim out."""

import claims_before


def test_the_page_has_each_word_of_before_and_each_interval_of_today():
    text = claims_before.page()
    assert text == claims_before.PAGE.read_text("utf-8"), "run python experiments/claims_before.py"
    words = {row["claim"]: row["word"] for row in claims_before.rows("claims_before.csv")}
    first = {number: claim for number, claim, *_ in claims_before.today() if number}
    assert list(words) == list(first) == [str(number) for number in range(1, 35)]
    assert all(f"| {number} | {first[number]} | {word} |" in text for number, word in words.items())
