/// <reference lib="esnext.disposable" />

/** What went wrong, in the `code` of a {@link RuvllmError}. */
export type ErrorCode =
    /** An option that does not exist, or has no such value. */
    | "OptionsError"
    /** The file cannot be read, ended early, or is another one by the time that a download goes on. */
    | "FileError"
    /** The file is no model, or none that this build can run. */
    | "ModelError"
    /** There is no memory for it; a model that is too large is refused before it is read. */
    | "MemoryError"
    /** The context is full, the session is busy, the bytes are no session of this model … */
    | "SessionError"
    /** The template refuses the conversation, or is wrong; tools are described wrongly. */
    | "ChatError"
    /** The schema or grammar is wrong, or beyond the limits. */
    | "GrammarError"
    /** The adapter is for another model, or is no adapter. */
    | "AdapterError"
    /** The model was closed, or the session freed. */
    | "ClosedError"
    /** The engine stopped. The model is closed; open it again. Others are not affected. */
    | "EngineError";

/** Every failure but those of a signal, which throw its reason, and of the caller's own functions. */
export class RuvllmError extends Error {
    readonly code: ErrorCode;
}

export interface OpenOptions {
    /** Ends the loading, at any moment. */
    signal?: AbortSignal;
    /** Told after each part; `total` is null if the server does not say. What it throws ends the loading. */
    onProgress?: (progress: { loaded: number; total: number | null }) => void;
    /** Instruction-set level: `simd128`, or `scalar` to compare with. Default: the best. */
    level?: "simd128" | "scalar";
    /**
     * Threads that compute: more than one in Node, and in pages that are served with the headers
     * `Cross-Origin-Opener-Policy: same-origin` and `Cross-Origin-Embedder-Policy: require-corp`. Default: half of what the
     * host counts, all of one or two; one in other pages. No answer depends on it.
     */
    threads?: number;
}

/** What is known of a model. */
export interface ModelInfo {
    /** `general.architecture` of the file. */
    readonly architecture: string;
    /** Number of weights. */
    readonly n_params: number;
    /** Context length that the model was trained for. */
    readonly n_ctx_train: number;
    /** Number of tokens of the vocabulary. */
    readonly n_vocab: number;
    /** Width of the residual stream. */
    readonly n_embd: number;
    /** Format of most weights. */
    readonly type: string;
    /** Instruction-set level in use. */
    readonly level: string;
    /** Threads that compute. */
    readonly threads: number;
    /** The file's chat template. */
    readonly chat_template: string | null;
}

export interface SessionOptions {
    /** Tokens that the session can hold. Default: as many as the model was trained for, at most 4096. */
    n_ctx?: number;
    /** Precision of keys and values. Default: `f16`. */
    kv_type?: "f32" | "f16" | "bf16" | "q8_0" | "q6_0" | "q5_0" | "q4_0";
    /** When the context is full, so many tokens at the beginning stay, and older ones go. Default: the answer ends. */
    context_shift?: number;
    /** Whether prompts are computed like generated tokens: the same bits, in about twice the time. */
    exact?: boolean;
}

/** A tool, as in the OpenAI API. */
export interface Tool {
    type: "function";
    function: { name: string; description?: string; parameters?: object; strict?: boolean };
}

/** A call of a tool, as in the OpenAI API: `arguments` is JSON text. */
export interface ToolCall {
    id: string;
    type: "function";
    function: { name: string; arguments: string };
}

/** A message of a conversation; templates know further fields. */
export interface Message {
    role: "system" | "user" | "assistant" | "tool" | (string & {});
    content: string | null;
    tool_calls?: ToolCall[];
    tool_call_id?: string;
    [field: string]: unknown;
}

export interface GenerateOptions {
    /** Ends the answer; the iterator throws its reason. The session keeps what was computed. */
    signal?: AbortSignal;
    /** Largest number of tokens. Default: until the model ends or the context is full. */
    max_tokens?: number;
    /** Texts before which the answer ends. */
    stop?: string | string[];
    /** 0 takes the likeliest token. Default 0.8. */
    temperature?: number;
    top_k?: number;
    top_p?: number;
    min_p?: number;
    repeat_penalty?: number;
    presence_penalty?: number;
    frequency_penalty?: number;
    /** The same seed makes the same choices. Default: another each time. */
    seed?: number;
    /** What the answer has to be, as in the OpenAI API. */
    response_format?:
        | { type: "text" | "json_object" }
        | { type: "json_schema"; json_schema: { name?: string; schema: object; strict?: boolean } };
    /** JSON Schema that the answer obeys; the name that llama.cpp has for it. */
    json_schema?: object;
    /** Grammar that the answer obeys, in GBNF. */
    grammar?: string;
    /** Regular expression that the answer matches. */
    regex?: string;
}

export interface ChatOptions extends GenerateOptions {
    /** Template instead of the file's. */
    chat_template?: string;
    /** Further variables of the template, such as `enable_thinking`. */
    chat_template_kwargs?: object;
    /** Tools that the model may call. */
    tools?: Tool[];
    tool_choice?: "auto" | "none" | "required" | { type: "function"; function: { name: string } };
}

/** What became of an answer. */
export interface Result {
    /** Why it ended: by the model or a stop text, at a limit, by calls, by the grammar's limits; null if it was left. */
    finish_reason: "stop" | "length" | "tool_calls" | "grammar" | "cancelled" | null;
    /** Tokens of the prompt that were not in the session already. */
    prompt_tokens: number;
    /** Tokens that the session held. */
    cached_tokens: number;
    /** Of the prompt's tokens, those that were computed. */
    computed_tokens: number;
    completion_tokens: number;
    /** Calls of tools; null if it continues a prompt. */
    tool_calls: ToolCall[] | null;
    /** Reasoning before the answer of a conversation; null if it continues a prompt. */
    reasoning_content: string | null;
    /** Tokens that the session holds. */
    n_past: number;
    /** Time until the first text, and from then on, in milliseconds. */
    prompt_ms: number;
    completion_ms: number;
}

/** A model, in the memory of a worker of its own: the page is never blocked. */
export class Model {
    private constructor();
    /**
     * Opens a GGUF file: an address (in Node also a path), a `File` or `Blob`, or its bytes. It is read in parts; a
     * download that breaks off is continued where the server can, with the same file only. At most 2 GiB.
     */
    static open(source: string | URL | Blob | Uint8Array | ArrayBuffer, options?: OpenOptions): Promise<Model>;
    readonly info: ModelInfo;
    /** Tokens of a text, as those of a prompt. */
    tokenize(text: string): Promise<Uint32Array>;
    /** Text of tokens, special ones included. */
    detokenize(tokens: ArrayLike<number>): Promise<string>;
    /** Vectors of length 1 for texts, pooled as the file says. */
    embed(text: string): Promise<Float32Array>;
    embed(texts: string[]): Promise<Float32Array[]>;
    /** A session: one text under way. */
    session(options?: SessionOptions): Promise<Session>;
    /** Bytes of the worker's memory. */
    memory(): Promise<number>;
    /** Ends the worker and gives its memory back; calls under way, and sessions, fail from now on. */
    close(): void;
    [Symbol.dispose](): void;
}

/** A text under way, with its keys and values. */
export class Session {
    private constructor();
    /** What became of the last answer. */
    readonly result: Result | null;
    /** Continues what the session holds by `prompt` and an answer, piece by piece. */
    generate(prompt: string, options?: GenerateOptions): AsyncGenerator<string, Result, void>;
    /** Answers a conversation; what the session holds of it already is not computed again. */
    chat(messages: Message[], options?: ChatOptions): AsyncGenerator<string, Result, void>;
    /** What the session holds, to be stored and loaded later. */
    save(): Promise<Uint8Array>;
    /** Replaces what the session holds. */
    load(bytes: Uint8Array): Promise<void>;
    /** Empties the session. */
    clear(): Promise<void>;
    /**
     * Attaches a LoRA adapter (the bytes of its GGUF file); returns the adapter's number. What the session holds is
     * computed again with it.
     */
    attach(adapter: Uint8Array, options?: { scale?: number }): Promise<number>;
    /** Detaches an adapter; what the session holds is computed again without it. */
    detach(adapter: number): Promise<void>;
    /** Reads a text and learns it; losses in nats, of the model and while it learns. */
    learn(text: string): Promise<{ tokens: number; base: number; learnt: number }>;
    /** Gives the session's memory back to the model's other sessions. */
    free(): Promise<void>;
    [Symbol.asyncDispose](): Promise<void>;
}
