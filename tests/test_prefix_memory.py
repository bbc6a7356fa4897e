"""Which workers have had which beginnings, and what placement makes of it."""

from __future__ import annotations

from router.placement import Candidate, Demand, Pair, Snapshot, WorkerKey, place
from router.prefix_memory import MAX_HOLDERS, STEP_TOKENS, PrefixMemory, PrefixTrail
from twinstage.types import WorkerId


def key(name: str, epoch: int = 1) -> WorkerKey:
    return WorkerKey(WorkerId(name), epoch)


def trail(memory: PrefixMemory, *, salt: str = "", model: str = "m") -> PrefixTrail:
    return PrefixTrail(memory, model_fingerprint=model, salt=salt)


PROMPT = list(range(5 * STEP_TOKENS))


# --- the memory -----------------------------------------------------------------------------------


def test_a_beginning_is_remembered_in_whole_steps_for_each_worker() -> None:
    memory = PrefixMemory()
    trail(memory).went_to(PROMPT[: 3 * STEP_TOKENS + 7], key("p"), key("d"), None)
    other = [*PROMPT[: 2 * STEP_TOKENS], *range(10_000, 10_000 + STEP_TOKENS)]
    trail(memory).went_to(other, key("q"))
    assert trail(memory).held_tokens(PROMPT) == {key("p"): 192, key("d"): 192, key("q"): 128}
    assert trail(memory).held_tokens(other) == {key("p"): 128, key("d"): 128, key("q"): 192}
    assert trail(memory).held_tokens(PROMPT[: STEP_TOKENS - 1]) == {}


def test_other_models_and_salts_have_nothing_in_common() -> None:
    memory = PrefixMemory()
    trail(memory, salt="a").went_to(PROMPT, key("p"))
    assert trail(memory, salt="b").held_tokens(PROMPT) == {}
    assert trail(memory, salt="a", model="n").held_tokens(PROMPT) == {}
    assert trail(memory, salt="a").held_tokens(PROMPT) == {key("p"): len(PROMPT)}


def test_an_answer_belongs_to_the_worker_that_made_it() -> None:
    memory = PrefixMemory()
    request = trail(memory)
    request.held_tokens(PROMPT)
    request.went_to(PROMPT, key("p"), key("d"))
    request.went_to([*PROMPT, *range(2 * STEP_TOKENS)], key("d"))
    held = trail(memory).held_tokens([*PROMPT, *range(2 * STEP_TOKENS), 1, 2, 3])
    assert held == {key("p"): 5 * STEP_TOKENS, key("d"): 7 * STEP_TOKENS}


def test_what_is_expected_counts_until_the_last_one_gives_it_up() -> None:
    memory = PrefixMemory()
    first, second = trail(memory), trail(memory)
    with second.expected(PROMPT[: 2 * STEP_TOKENS], key("p")):
        with first.expected(PROMPT, key("p"), key("d")):
            assert trail(memory).held_tokens(PROMPT) == {key("p"): len(PROMPT), key("d"): len(PROMPT)}
            assert len(memory) == 0
        assert trail(memory).held_tokens(PROMPT) == {key("p"): 2 * STEP_TOKENS}
        memory.clear()
        assert trail(memory).held_tokens(PROMPT) == {}
    assert trail(memory).held_tokens(PROMPT) == {}


def test_a_worker_has_no_more_than_it_went_to_although_more_is_known() -> None:
    memory = PrefixMemory()
    request = trail(memory)
    request.held_tokens(PROMPT)
    request.went_to(PROMPT[: 3 * STEP_TOKENS - 1], key("p"))
    assert trail(memory).held_tokens(PROMPT) == {key("p"): 2 * STEP_TOKENS}


def test_the_memory_is_bounded_and_keeps_what_was_used_last() -> None:
    memory = PrefixMemory(max_steps=6)
    old, used = list(range(1000, 1000 + 3 * STEP_TOKENS)), list(range(2000, 2000 + 3 * STEP_TOKENS))
    trail(memory).went_to(used, key("p"))
    trail(memory).went_to(old, key("p"))
    trail(memory).went_to(used, key("p"))
    trail(memory).went_to(PROMPT[: 2 * STEP_TOKENS], key("p"))
    assert len(memory) == 6
    assert trail(memory).held_tokens(used) == {key("p"): 3 * STEP_TOKENS}
    assert trail(memory).held_tokens(old) == {}
    for number in range(2 * MAX_HOLDERS):
        trail(memory).went_to(used, key(f"w{number}"))
    assert len(trail(memory).held_tokens(used)) == MAX_HOLDERS
    memory.clear()
    assert trail(memory).held_tokens(used) == {}


# --- placement ------------------------------------------------------------------------------------


def candidates(
    name: str, *, waiting: tuple[int, int] = (0, 0), running: tuple[int, int] = (0, 0)
) -> tuple[Candidate, ...]:
    return tuple(
        Candidate(
            key=key(f"{name}{index}"),
            waiting_tokens=waiting[index],
            running=running[index],
            free_blocks=100,
            total_blocks=100,
            block_size=16,
        )
        for index in range(2)
    )


def chosen(
    held: int, *, waiting: tuple[int, int] = (0, 0), running: tuple[int, int] = (0, 0), turn: int = 0
) -> tuple[str, str]:
    """Where 1,000 tokens go of which the second worker of each kind has `held`."""
    demand = Demand(num_tokens=1000, held_tokens={key("p1"): held, key("d1"): held})
    snapshot = Snapshot(prefill=candidates("p", waiting=waiting), decode=candidates("d", running=running))
    pair = place(demand, snapshot, turn=turn)
    assert isinstance(pair, Pair)
    assert pair.decode is not None
    return pair.prefill.worker_id, pair.decode.worker_id


def test_workers_that_hold_the_beginning_are_preferred_whose_turn_it_ever_is() -> None:
    for turn in range(4):
        assert chosen(960, turn=turn) == ("p1", "d1")
        assert chosen(64, turn=turn) == ("p1", "d1")
    assert {chosen(0, turn=turn) for turn in range(2)} == {("p0", "d0"), ("p1", "d1")}


def test_a_cached_beginning_is_worth_the_tokens_that_it_saves() -> None:
    assert chosen(960, waiting=(0, 959))[0] == "p1"
    assert chosen(960, waiting=(0, 961))[0] == "p0"
    assert chosen(64, waiting=(0, 100))[0] == "p0"


def test_a_decode_worker_may_have_one_sequence_more_if_it_holds_most_of_the_prompt() -> None:
    assert chosen(960, running=(3, 4))[1] == "d1"
    assert chosen(960, running=(3, 5))[1] == "d0"
    assert chosen(448, running=(3, 4))[1] == "d0"
    assert chosen(448, running=(3, 3))[1] == "d1"


def test_room_comes_before_what_is_held() -> None:
    full, empty = Candidate(key=key("d1"), free_blocks=2, total_blocks=100, block_size=16), candidates("d")[0]
    demand = Demand(num_tokens=1000, held_tokens={key("d1"): 960})
    pair = place(demand, Snapshot(prefill=candidates("p"), decode=(empty, full)))
    assert isinstance(pair, Pair)
    assert pair.decode == key("d0")
