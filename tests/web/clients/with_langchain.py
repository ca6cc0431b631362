"""What langchain-openai makes of the server at sys.argv[1], as one line of JSON."""

import json
import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

address, key, asked, tool = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
chat = ChatOpenAI(model="talking", base_url=f"{address}/v1", api_key=key, temperature=0, max_tokens=200)
found = {}
whole = chat.invoke("Who are you?")
found["text"], found["usage"] = whole.content, whole.usage_metadata["total_tokens"]
pieces = list(chat.stream("Who are you?", stream_usage=True))
found["streamed"] = "".join(one.content for one in pieces)
found["streamed_usage"] = sum(one.usage_metadata["total_tokens"] for one in pieces if one.usage_metadata)
bound = chat.bind_tools([tool])
called = bound.invoke(asked)
found["call"] = [called.response_metadata["finish_reason"], called.tool_calls[0]["name"]]
found["arguments"] = called.tool_calls[0]["args"]
told = ToolMessage("sunny", tool_call_id=called.tool_calls[0]["id"])
found["spoken"] = bound.invoke([HumanMessage(asked), called, told]).content
found["scored"] = len(chat.bind(logprobs=True).invoke("Who are you?").response_metadata["logprobs"]["content"])
# It sends token ids of OpenAI's own tokenizer unless it is told not to: a model's window is in its own tokens.
vectors = OpenAIEmbeddings(
    model="talking", base_url=f"{address}/v1", api_key=key, check_embedding_ctx_length=False
).embed_documents(["a", "b"])
found["width"] = len(vectors[0])
print(json.dumps(found))
