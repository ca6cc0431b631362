"""What litellm makes of the server at sys.argv[1], as one line of JSON."""

import asyncio
import json
import sys

import litellm

address, key, asked, tool = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
litellm.suppress_debug_info = True
how = {"model": "openai/talking", "api_base": f"{address}/v1", "api_key": key, "temperature": 0}
who = [{"role": "user", "content": "Who are you?"}]
found = {}
whole = litellm.completion(messages=who, **how)
found["text"], found["usage"] = whole.choices[0].message.content, whole.usage.total_tokens
pieces = list(litellm.completion(messages=who, stream=True, stream_options={"include_usage": True}, **how))
found["streamed"] = "".join(one.choices[0].delta.content or "" for one in pieces if one.choices)
found["streamed_usage"] = pieces[-1].usage.total_tokens
called = litellm.completion(messages=[{"role": "user", "content": asked}], tools=[tool], **how).choices[0]
found["call"] = [called.finish_reason, called.message.tool_calls[0].function.name]
found["arguments"] = json.loads(called.message.tool_calls[0].function.arguments)
vector = litellm.embedding(model="openai/talking", input=["a"], api_base=f"{address}/v1", api_key=key)
found["width"] = len(vector.data[0]["embedding"])
found["later"] = asyncio.run(litellm.acompletion(messages=who, **how)).choices[0].message.content
try:
    litellm.completion(messages=who, **{**how, "model": "openai/nobody"})
except litellm.NotFoundError as error:
    found["refused"] = "talking" in str(error)
print(json.dumps(found))
