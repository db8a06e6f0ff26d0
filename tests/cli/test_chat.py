"""`jaxserve chat`: the history it keeps, and Ctrl-C."""

import signal

import pytest

from jaxserve.cli.chat import Conversation
from jaxserve.config import EngineConfig
from jaxserve.sampling_params import SamplingParams
from tests.cli.fakes import FakeLLM, answer


@pytest.fixture
def llm(fake_model):
    return FakeLLM(config=EngineConfig())


def chat_ids(*turns):
    return FakeLLM(config=EngineConfig()).tokenizer.encode_chat(
        [{"role": role, "content": content} for role, content in turns]
    )


def test_piped_messages_are_turns_of_one_conversation(jaxserve_cli):
    result = jaxserve_cli("chat", "--max-tokens", 4, stdin="hi\n\nyou\n")
    assert result.exit_code == 0, result.output
    first = answer(chat_ids(("user", "hi")), 4)
    second = answer(chat_ids(("user", "hi"), ("assistant", first), ("user", "you")), 4)
    assert result.stdout == f"{first}\n{second}\n"


def test_reset_forgets_all_but_the_system_message(jaxserve_cli):
    result = jaxserve_cli(
        "chat", "--max-tokens", 4, "--system", "be", stdin="hi\n/reset\nhi\n/exit\nunread\n"
    )
    expected = answer(chat_ids(("system", "be"), ("user", "hi")), 4)
    assert result.stdout == f"{expected}\n{expected}\n"


def test_a_message_that_does_not_fit_is_reported_and_forgotten(jaxserve_cli):
    result = jaxserve_cli("chat", "--max-tokens", 4, stdin=f"{'x' * 300}\nhi\n")
    assert result.exit_code == 0
    assert "at most 199" in result.stderr
    assert result.stdout == answer(chat_ids(("user", "hi")), 4) + "\n"


def test_ctrl_c_stops_the_answer_and_not_the_program(llm, capsys):
    conversation = Conversation(llm, SamplingParams(max_tokens=50), None)
    llm.engine.on_step = lambda: (
        signal.raise_signal(signal.SIGINT) if llm.engine.num_steps == 3 else None
    )
    conversation.say("hi")
    said = answer(chat_ids(("user", "hi")), 3)
    assert capsys.readouterr().out == f"{said}\n"
    assert conversation.messages[-1] == {"role": "assistant", "content": said}
    assert not llm.engine.has_work
    conversation.say("on")
    assert len(capsys.readouterr().out) == 51


def test_a_second_ctrl_c_ends_the_program(llm):
    conversation = Conversation(llm, SamplingParams(max_tokens=50), None)

    def interrupt_twice():
        # To this thread, so that the first is handled before the second comes.
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    llm.engine.on_step = interrupt_twice
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            conversation.say("hi")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
