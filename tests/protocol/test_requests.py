"""Fields of both endpoints beyond sampling: deadlines, constraints, what is refused."""

import pytest

from jaxserve.protocol import RequestError, error_body
from tests.protocol.answers import WEATHER, chat, completion
from tests.protocol.tokenizers import marked_tokenizer

SCHEMA = {"type": "object"}


@pytest.mark.parametrize("make", [chat, completion])
class TestBothEndpoints:
    @pytest.mark.parametrize(
        ("field", "remedy"),
        [
            ("guided_json", "structured_outputs.json"),
            ("guided_regex", "structured_outputs.regex"),
            ("guided_choice", "structured_outputs.choice"),
            ("guided_grammar", "structured_outputs.grammar"),
            ("bad_words", "leave it out"),
            ("logits_processors", "leave it out"),
            ("truncate_prompt_tokens", "shorter prompt"),
            ("use_beam_search", "leave it out"),
        ],
    )
    def test_what_would_change_the_answer_is_refused(self, make, field, remedy):
        with pytest.raises(RequestError, match=f"^{field} is not supported; .*{remedy}") as caught:
            make(**{field: ["x"]}).sampling_params()
        assert caught.value.param == field
        for value in (None, False, []):
            assert make(**{field: value}).sampling_params() == make().sampling_params()

    @pytest.mark.parametrize("timeout", [0, -1.5])
    def test_a_deadline_lies_ahead(self, make, timeout):
        with pytest.raises(RequestError, match="above 0 seconds") as caught:
            make(timeout=timeout).sampling_params()
        assert caught.value.param == "timeout"
        make(timeout=0.5).sampling_params()

    @pytest.mark.parametrize(
        ("body", "kind"),
        [
            ({"structured_outputs": {"json": SCHEMA}}, "json"),
            ({"structured_outputs": {"json": '{"type": "object"}'}}, "json"),
            ({"structured_outputs": {"regex": "a+"}}, "regex"),
            ({"structured_outputs": {"choice": ["a", "b"]}}, "choice"),
            ({"structured_outputs": {"grammar": 'start: "a"'}}, "grammar"),
            ({"structured_outputs": {"json_object": True}}, "json_object"),
            ({"response_format": {"type": "json_object"}}, "json_object"),
            (
                {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
                "json_object",
            ),
            (
                {
                    "response_format": {
                        "type": "json_schema",
                        "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                    }
                },
                "json",
            ),
        ],
    )
    def test_constraints_reach_the_engine(self, make, body, kind):
        assert make(**body).sampling_params().structured_outputs.kind == kind

    @pytest.mark.parametrize("value", [None, {"type": "text"}])
    def test_text_is_no_constraint(self, make, value):
        assert make(response_format=value).sampling_params().structured_outputs is None

    @pytest.mark.parametrize(
        "value",
        [
            {},
            {"regex": ""},
            {"regex": "a", "choice": ["a"]},
            {"choice": []},
            {"json_object": False},
        ],
    )
    def test_not_one_constraint(self, make, value):
        with pytest.raises(RequestError, match="structured_outputs") as caught:
            make(structured_outputs=value).sampling_params()
        assert caught.value.param == "structured_outputs"


@pytest.mark.parametrize(
    ("request_", "kind", "field"),
    [
        (chat(structured_outputs={"regex": "("}), "regex", "structured_outputs.regex"),
        (chat(response_format={"type": "json_object"}), "json", "response_format"),
        (completion(response_format={"type": "json_object"}), "json", "response_format"),
        (chat(tools=[WEATHER], tool_choice="required"), "grammar", "tools"),
    ],
)
def test_the_engines_complaint_names_the_field_that_was_sent(request_, kind, field):
    error = request_.blame(ValueError(f"structured_outputs.{kind} cannot be followed: x"))
    assert str(error) == f"{field} cannot be followed: x"
    assert error.param == field.split(".")[0]
    assert request_.blame(ValueError("prompt token 9 is outside the vocabulary")).param == "prompt"
    other = request_.blame(ValueError("logit_bias has token id 9"))
    assert (str(other), other.param) == ("logit_bias has token id 9", "logit_bias")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (413, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
        (503, "server_error"),
    ],
)
def test_kinds_of_errors(status, kind):
    assert error_body("no", status, None, None)["error"]["type"] == kind


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "top_logprobs=-1"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens=0 generates nothing"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens=0"),
        ({"max_tokens": 5, "max_completion_tokens": -1}, "max_completion_tokens", "tokens=-1"),
    ],
)
def test_complaints_about_a_chat_name_its_own_fields(body, param, words):
    with pytest.raises(RequestError, match=words) as caught:
        chat(**body).sampling_params()
    assert caught.value.param == param


def test_no_candidates_are_wanted_where_there_are_no_log_probabilities():
    assert chat(top_logprobs=0).sampling_params().logprobs is None
    assert chat(logprobs=False, top_logprobs=0).sampling_params().logprobs is None


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize(
    ("name", "refused", "fine"),
    [
        ("prompt_logprobs", [0, 2], [None]),
        ("detokenize", [False], [None, True]),
        ("cache_salt", ["x"], [None, ""]),
        ("kv_transfer_params", [{"a": 1}], [None, {}]),
        ("thinking_token_budget", [5], [None]),
    ],
)
def test_fields_that_would_change_the_answer_are_refused(make, name, refused, fine):
    for value in refused:
        with pytest.raises(RequestError, match=f"{name}.* is not supported") as caught:
            make(**{name: value}).sampling_params()
        assert caught.value.param == name
    for value in fine:
        make(**{name: value}).sampling_params()


@pytest.mark.parametrize("name", ["echo", "add_special_tokens"])
def test_fields_of_completions_are_refused_in_chats(name):
    with pytest.raises(RequestError, match=name):
        chat(**{name: True}).sampling_params()
    chat(**{name: False}).sampling_params()


@pytest.mark.parametrize("name", ["self", "messages", "tools", "continue_final_message"])
def test_template_variables_take_no_reserved_name(name):
    with pytest.raises(RequestError, match=name) as caught:
        chat(chat_template_kwargs={name: 1}).prompts(marked_tokenizer())
    assert caught.value.param == "chat_template_kwargs"


def test_past_refusals_are_what_the_assistant_said():
    for message in (
        {"role": "assistant", "content": None, "refusal": "no"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ):
        (found,) = chat(messages=[message]).messages
        assert found.for_template() == {"role": "assistant", "content": "no"}


def test_a_text_may_have_no_first_token():
    tokenizer = marked_tokenizer()
    tokenizer.adds_bos, tokenizer.bos_token_id = True, 7
    for value in (None, True, False):
        (prompt,) = completion(prompt="ab", add_special_tokens=value).prompts(tokenizer)
        assert prompt.token_ids == ([97, 98] if value is False else [7, 97, 98])
