"""Fields of both endpoints beyond sampling: deadlines, constraints, what is refused."""

import pytest

from jaxserve.protocol import RequestError, error_body
from tests.protocol.answers import WEATHER, chat, completion

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
