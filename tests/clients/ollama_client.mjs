// Ollama's own client for JavaScript against `ruvllm serve`: node ollama_client.mjs URL [KEY]

import assert from 'node:assert/strict'
import { Ollama } from 'ollama'

const [url, key] = process.argv.slice(2)
const headers = key ? { Authorization: `Bearer ${key}` } : {}
const client = new Ollama({ host: url, headers })
const model = (await client.list()).models[0].name
const options = { num_predict: 12, temperature: 0 }
const messages = [{ role: 'user', content: 'What is ownership?' }]

const whole = await client.chat({ model, messages, options })
assert.equal(whole.eval_count, 12)
let text = ''
let last
for await (last of await client.chat({ model, messages, options, stream: true })) text += last.message.content
assert.equal(text, whole.message.content)
assert.equal(last.done_reason, 'length')

const one = await client.generate({ model, prompt: 'Ownership is', raw: true, options })
text = ''
for await (const part of await client.generate({ model, prompt: 'Ownership is', raw: true, options, stream: true })) text += part.response
assert.equal(text, one.response)

const vectors = await client.embed({ model, input: ['one', 'two'] })
assert.equal(vectors.embeddings.length, 2)
assert.ok((await client.show({ model })).capabilities.includes('completion'))
assert.equal((await client.ps()).models[0].name, model)
assert.ok((await client.version()).version)
const refused = async (call, status) =>
  assert.rejects(call, error => error.status_code === status && error.message.length > 0)
await refused(client.chat({ model: 'llama9', messages }), 404)
await refused(client.pull({ model: 'llama9' }), 501)
await refused(client.delete({ model: 'llama9' }), 501)

// A stream that is given up does no harm.
const stream = await client.chat({ model, messages, options: { num_predict: 400 }, stream: true })
setTimeout(() => stream.abort(), 20)
await assert.rejects(async () => { for await (const _ of stream) { /* until it is gone */ } }, { name: 'AbortError' })
assert.equal((await client.chat({ model, messages, options })).message.content, whole.message.content)
console.log('ollama (JavaScript): well')
