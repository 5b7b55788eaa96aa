"""Which request fields are accepted, at which values."""

from __future__ import annotations

import typing

import pytest
from openai.types import completion_create_params
from openai.types.chat import chat_completion_message
from openai.types.chat import completion_create_params as chat_create_params

from jaxserve.errors import InvalidRequestError
from jaxserve.serving import fields
from jaxserve.serving.http_api.schemas import ChatBody, CompletionBody, GenerationBody, parse_body
from jaxserve.serving.messages import parse_messages

BODIES: dict[type[GenerationBody], dict[str, typing.Any]] = {
    CompletionBody: {"prompt": "hi"},
    ChatBody: {"messages": [{"role": "user", "content": "hi"}]},
}


@pytest.mark.parametrize(("schema", "params"), [(CompletionBody, completion_create_params), (ChatBody, chat_create_params)])
def test_every_field_of_the_openai_client_is_known(schema: type[GenerationBody], params: typing.Any) -> None:
    names = {name for cls in typing.get_args(params.CompletionCreateParams) for name in cls.__annotations__}
    names |= set(params.CompletionCreateParamsBase.__annotations__)
    assert len(names) > 15
    assert names - set(schema.model_fields) - set(schema.neutral_fields) - fields.INERT_FIELDS == set()


@pytest.mark.parametrize("schema", BODIES)
def test_no_field_is_both_implemented_and_in_the_table(schema: type[GenerationBody]) -> None:
    assert not set(schema.model_fields) & (set(schema.neutral_fields) | fields.INERT_FIELDS)
    assert not set(schema.neutral_fields) & fields.INERT_FIELDS


@pytest.mark.parametrize("schema", BODIES)
def test_neutral_values_are_accepted_and_others_refused_by_name(schema: type[GenerationBody]) -> None:
    for name, allowed in schema.neutral_fields.items():
        for value in (None, *allowed):
            parse_body(schema, BODIES[schema] | {name: value})
        with pytest.raises(InvalidRequestError, match=f"^{name} is not supported") as refused:
            parse_body(schema, BODIES[schema] | {name: "something else"})
        assert (refused.value.param, refused.value.code) == (name, "unsupported_parameter")
    for name in fields.INERT_FIELDS:
        parse_body(schema, BODIES[schema] | {name: {"any": ["thing"]}})


@pytest.mark.parametrize("schema", BODIES)
def test_null_means_left_out_for_every_implemented_field(schema: type[GenerationBody]) -> None:
    optional = [name for name, field in schema.model_fields.items() if not field.is_required()]
    assert parse_body(schema, BODIES[schema] | dict.fromkeys(optional)) == parse_body(schema, BODIES[schema])


@pytest.mark.parametrize(
    ("name", "value"), [("n", True), ("n", 2), ("n", 1.5), ("repetition_penalty", 1.1), ("presence_penalty", False), ("use_beam_search", 0)]
)
def test_neutral_values_are_compared_as_json(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        parse_body(CompletionBody, {"prompt": "hi", name: value})


def test_integers_and_floats_of_one_value_are_the_same() -> None:
    parse_body(CompletionBody, {"prompt": "hi", "n": 1.0, "repetition_penalty": 1, "presence_penalty": 0.0})


@pytest.mark.parametrize(("name", "nearest"), [("temprature", "temperature"), ("max_token", "max_tokens"), ("repetition_penality", "repetition_penalty")])
def test_unknown_fields_get_the_nearest_name(name: str, nearest: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"unknown field '{name}'; did you mean '{nearest}'") as refused:
        parse_body(CompletionBody, {"prompt": "hi", name: 1})
    assert refused.value.param == name


def test_an_answer_can_be_sent_back_as_the_client_dumps_it() -> None:
    answer = chat_completion_message.ChatCompletionMessage(role="assistant", content="yes")
    assert parse_messages([answer.model_dump()]) == [{"role": "assistant", "content": "yes"}]


def test_text_parts_are_joined_by_newlines() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert parse_messages([{"role": "user", "content": parts}]) == [{"role": "user", "content": "one\ntwo"}]
