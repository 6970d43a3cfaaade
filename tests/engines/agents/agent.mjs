// Asks for a sum with the official clients of OpenAI and Anthropic, and adds numbers whenever the model calls its tool.
// node agent.mjs chat|responses|messages whole|streamed, with BASE_URL and API_KEY; prints the last text.
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const [dialect, form] = process.argv.slice(2);
const streamed = form === "streamed";
const names = { baseURL: process.env.BASE_URL, apiKey: process.env.API_KEY };
const schema = { type: "object", properties: { a: { type: "integer" }, b: { type: "integer" } } };
const question = { role: "user", content: "20+22?" };

const add = (text) => { const { a, b } = JSON.parse(text); return String(a + b); };

// The clients repeat a request, but not a stream that breaks.
async function twice(ask) {
  try {
    return await ask();
  } catch (error) {
    if (!streamed) throw error;
    console.error("again after", String(error));
    return await ask();
  }
}

const agents = {
  async chat() {
    const client = new OpenAI(names);
    const tools = [{ type: "function", function: { name: "add", parameters: schema } }];
    const messages = [question];
    for (;;) {
      const request = { model: "any", messages, tools };
      const answer = await twice(async () => streamed
        ? client.chat.completions.stream(request).finalChatCompletion()
        : client.chat.completions.create(request));
      const { message } = answer.choices[0];
      if (!message.tool_calls?.length) return message.content;
      messages.push(message);
      for (const call of message.tool_calls) {
        messages.push({ role: "tool", tool_call_id: call.id, content: add(call.function.arguments) });
      }
    }
  },
  async responses() {
    const client = new OpenAI(names);
    const tools = [{ type: "function", name: "add", parameters: schema, strict: false }];
    let input = [question], previous;
    for (;;) {
      const request = { model: "any", input, tools, previous_response_id: previous };
      const response = await twice(async () => streamed
        ? client.responses.stream(request).finalResponse()
        : client.responses.create(request));
      const calls = response.output.filter((item) => item.type === "function_call");
      if (!calls.length) return response.output_text;
      input = calls.map((c) => ({ type: "function_call_output", call_id: c.call_id, output: add(c.arguments) }));
      previous = response.id;
    }
  },
  async messages() {
    const client = new Anthropic(names);
    const tools = [{ name: "add", input_schema: schema }];
    const messages = [question];
    for (;;) {
      const request = { model: "any", max_tokens: 256, messages, tools };
      const message = await twice(async () => streamed
        ? client.messages.stream(request).finalMessage()
        : client.messages.create(request));
      const calls = message.content.filter((block) => block.type === "tool_use");
      if (!calls.length) return message.content.map((block) => block.text ?? "").join("");
      const results = calls.map((c) => ({
        type: "tool_result", tool_use_id: c.id, content: add(JSON.stringify(c.input)),
      }));
      messages.push({ role: "assistant", content: message.content }, { role: "user", content: results });
    }
  },
};

console.log(await agents[dialect]());
