// The chat page. Talks to /v1/chat/completions of the server that it came from, and to nothing else.
// Model text only ever becomes text nodes, so that text that looks like HTML stays text.

const $ = (id) => document.getElementById(id);
const DEFAULTS = { system: "", temperature: 0.7, topP: 1, max: 512, seed: "", theme: "" };
const ORIGIN_TITLES = {
  accepted: "drafted here and kept",
  recovered: "corrected by the target",
  bonus: "the target's extra token",
  sibling: "added by the target from the draft's alternatives",
  cloud: "written by the target alone",
  edge_only: "written by the draft alone, not exact",
};

let settings = { ...DEFAULTS, ...stored("settings") };
let messages = [];  // {role, content}; an answer that was stopped or broken stays as far as it came
let running = null;  // AbortController of the answer in progress
let model = "";

function stored(name) {
  try {
    return JSON.parse(localStorage.getItem(`specwire.${name}`)) ?? {};
  } catch {
    return {};
  }
}

function store(name, value) {
  try {
    localStorage.setItem(`specwire.${name}`, JSON.stringify(value));
  } catch { /* private windows may refuse: the setting then lasts as long as the page */ }
}

function headers() {
  const key = sessionStorage.getItem("specwire.key");
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

// -- the server's side ---------------------------------------------------------------------------

async function loadModel() {
  try {
    const reply = await fetch("v1/models", { headers: headers() });
    const body = await reply.json();
    if (!reply.ok) throw new Error(body.error.message);
    model = body.data[0].id;
    $("model").textContent = model;
  } catch (error) {
    showError(error.message);
  }
}

/** Yields the JSON objects of a stream of server-sent events. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    buffer += value;
    let end;
    while ((end = buffer.indexOf("\n\n")) >= 0) {
      const data = buffer.slice(0, end).replace(/^data: /, "");
      buffer = buffer.slice(end + 2);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
  throw new Error("The connection to this page's server was lost.");
}

async function* answer(signal) {
  const system = settings.system.trim();
  const body = {
    model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    temperature: settings.temperature,
    top_p: settings.topP,
    max_tokens: settings.max,
    seed: settings.seed === "" ? null : Number(settings.seed),
    stream: true,
    stream_options: { include_usage: true },
    specwire: { trace: true },
  };
  const reply = await fetch("v1/chat/completions", {
    method: "POST", headers: headers(), body: JSON.stringify(body), signal,
  });
  if (!reply.ok) throw new Error((await reply.json()).error.message);
  for await (const event of events(reply)) {
    if (event.error) throw new Error(event.error.message);
    yield event;
  }
}

// -- turns ---------------------------------------------------------------------------------------

function addTurn(role, text) {
  const turn = $("turn").content.firstElementChild.cloneNode(true);
  turn.classList.add(role);
  turn.querySelector(".who").textContent = role === "user" ? "You" : "Assistant";
  turn.querySelector(".text").textContent = text;
  turn.querySelector(".copy").addEventListener("click", (event) => copy(event.target, turn));
  const again = turn.querySelector(".again");
  if (role === "user") again.remove();
  else again.addEventListener("click", regenerate);
  $("log").append(turn);
  $("empty").hidden = true;
  markLast();
  return turn;
}

/** Only the last answer can be asked for again. */
function markLast() {
  const buttons = [...document.querySelectorAll(".again")];
  buttons.forEach((button, index) => { button.hidden = index < buttons.length - 1; });
}

async function copy(button, turn) {
  const text = turn.querySelector(".text").textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Plain http on another host than this one has no clipboard: select the text instead.
    getSelection().selectAllChildren(turn.querySelector(".text"));
    announce("Copying is not allowed here; the text is selected.");
    return;
  }
  button.textContent = "Copied";
  announce("Copied.");
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

/** Appends text, as one element per run of tokens of one origin. */
function appendTokens(place, text, origin) {
  if (!text) return;
  const last = place.lastElementChild;
  if (last && last.className === origin) {
    last.firstChild.appendData(text);
    return;
  }
  const span = document.createElement("span");
  span.className = origin;
  span.title = ORIGIN_TITLES[origin] ?? origin;
  span.append(document.createTextNode(text));
  place.append(span);
}

async function write() {
  hideError();
  const controller = new AbortController();
  running = controller;
  const turn = addTurn("assistant", "");
  const place = turn.querySelector(".text");
  const note = turn.querySelector(".note");
  const warning = turn.querySelector(".warning");
  turn.classList.add("writing");
  setRunning(true);
  scrollDown();
  const figures = new Figures();
  const chat = messages;  // a new chat may replace it meanwhile
  let report = null;
  let finish = "";
  try {
    for await (const event of answer(controller.signal)) {
      const stay = atBottom();
      const trace = event.specwire;
      if (trace?.lossy_because?.includes("edge_only") && warning.hidden) {
        warning.hidden = false;
        announce(warning.textContent);
      }
      if (trace?.tokens) {
        const origin = trace.tokens.at(-1)?.origin ?? place.lastElementChild?.className ?? "accepted";
        for (const token of trace.tokens) appendTokens(place, token.text, token.origin);
        // A character's last bytes may come without a token of their own.
        const rest = (event.choices[0]?.delta.content ?? "").length
          - trace.tokens.reduce((sum, token) => sum + token.text.length, 0);
        if (!trace.tokens.length && rest > 0) appendTokens(place, event.choices[0].delta.content, origin);
        figures.add(trace);
      } else if (trace) {
        report = trace;
      }
      finish = event.choices[0]?.finish_reason ?? finish;
      if (stay) scrollDown();
    }
    keepBottom(() => { note.textContent = summary(report, finish); });
    announce(`Answer: ${place.textContent}`);
  } catch (error) {
    if (controller.signal.aborted) {
      keepBottom(() => { note.textContent = "Stopped."; });
      announce("Stopped.");
    } else {
      keepBottom(() => {
        note.textContent = place.textContent ? "The answer broke off here." : "No answer.";
        note.classList.add("bad");
      });
      showError(error.message);
    }
  } finally {
    chat.push({ role: "assistant", content: place.textContent });
    turn.classList.remove("writing");
    if (running === controller) {
      running = null;
      setRunning(false);
    }
  }
}

function summary(report, finish) {
  if (!report) return "";
  const parts = [...(report.rounds ? [`${report.tokens_per_round.toFixed(1)} tokens a round`] : []),
    `first token after ${Math.round(report.first_token_ms)} ms`, `seed ${report.seeds[0]}`];
  if (finish === "length") parts.unshift("cut at the longest answer allowed");
  const because = report.lossy_because ?? [];
  if (because.includes("verification")) parts.unshift("not exact: the verifier's rule is lossy");
  if (because.includes("prompt")) parts.unshift("follows what the draft wrote alone");
  return parts.join(" · ");
}

async function submit() {
  const text = $("prompt").value.trim();
  if (!text || running) return;
  dropFailed();
  $("prompt").value = "";
  fit();
  messages.push({ role: "user", content: text });
  addTurn("user", text);
  await write();
}

async function regenerate() {
  if (running || messages.at(-1)?.role !== "assistant") return;
  messages.pop();
  $("log").lastElementChild.remove();
  $("prompt").focus();
  await write();
}

/** An answer without a word is no part of the conversation. */
function dropFailed() {
  if (messages.at(-1)?.role === "assistant" && !messages.at(-1).content) {
    messages.pop();
    $("log").lastElementChild.remove();
    // Its question goes too: two in a row would confuse most templates.
    messages.pop();
    $("log").lastElementChild.remove();
  }
}

function newChat() {
  running?.abort();
  running = null;
  setRunning(false);
  messages = [];
  $("log").replaceChildren();
  $("empty").hidden = false;
  hideError();
  new Figures().show();
  $("prompt").focus();
}

// -- live figures --------------------------------------------------------------------------------

class Figures {
  constructor() {
    Object.assign(this, {
      started: 0, tokens: 0, drafted: 0, accepted: 0, bytes: 0, trips: [], plan: "–", first: 0,
    });
  }

  add(trace) {
    const now = performance.now();
    // The first tokens end the wait for the prompt; speed counts from them.
    if (!this.started) this.started = now;
    else this.tokens += trace.tokens.length;
    this.first += trace.tokens.length;
    const round = trace.round;
    if (trace.lossy_because?.includes("edge_only")) this.plan = "edge only";
    if (round) {
      this.drafted += round.drafted;
      this.accepted += round.accepted;
      this.bytes += round.up_bytes + round.down_bytes;
      this.trips = [...this.trips.slice(-9), round.round_trip_ms];
      this.plan = round.drafted ? `${round.drafted} tokens` : "cloud writes";
    }
    this.seconds = (now - this.started) / 1000;
    this.show();
  }

  show() {
    const trips = [...this.trips].sort((a, b) => a - b);
    const set = (id, known, text) => { $(id).textContent = known ? text : "–"; };
    set("f-speed", this.tokens && this.seconds, `${(this.tokens / this.seconds).toFixed(1)} tok/s`);
    set("f-acceptance", this.drafted, `${Math.round(100 * this.accepted / this.drafted)} %`);
    set("f-rtt", trips.length, `${Math.round(trips[trips.length >> 1])} ms`);
    set("f-bytes", this.first, `${Math.round(this.bytes / this.first)} B`);
    $("f-plan").textContent = this.plan;
  }
}

// -- the page ------------------------------------------------------------------------------------

function setRunning(on) {
  $("send").hidden = on;
  $("stop").hidden = !on;
  if (on) announce("Writing.");
}

function announce(text) { $("status").textContent = text; }
function showError(text) {
  keepBottom(() => {
    $("error").textContent = text;
    $("error").hidden = false;
  });
}
function hideError() { $("error").hidden = true; }

const scroller = document.querySelector("main");
const atBottom = () => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 60;
const scrollDown = () => { scroller.scrollTop = scroller.scrollHeight; };

/** A reader who sees the end still sees it after `change`; one who has scrolled up stays there. */
function keepBottom(change) {
  const stay = atBottom();
  change();
  if (stay) scrollDown();
}

function fit() {
  const box = $("prompt");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
}

function showOrigins(on) {
  document.body.classList.toggle("origins", on);
  $("show-origin").checked = on;
  $("legend").hidden = !on;
}

function applyTheme() {
  if (settings.theme) document.documentElement.dataset.theme = settings.theme;
  else delete document.documentElement.dataset.theme;
}

function fillSettings(values) {
  $("s-system").value = values.system;
  $("s-temperature").value = values.temperature;
  $("s-top-p").value = values.topP;
  $("s-max").value = values.max;
  $("s-seed").value = values.seed;
  $("s-theme").value = values.theme;
}

function saveSettings() {
  settings = {
    system: $("s-system").value,
    temperature: Number($("s-temperature").value),
    topP: Number($("s-top-p").value),
    max: Number($("s-max").value),
    seed: $("s-seed").value.trim(),
    theme: $("s-theme").value,
  };
  store("settings", settings);
  const key = $("s-key").value.trim();
  if (key) sessionStorage.setItem("specwire.key", key);
  else sessionStorage.removeItem("specwire.key");
  applyTheme();
  hideError();
  loadModel();
}

$("composer").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
$("prompt").addEventListener("input", fit);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running && !$("settings").open) running.abort();
});
$("stop").addEventListener("click", () => { running?.abort(); $("prompt").focus(); });
$("new-chat").addEventListener("click", newChat);
$("show-origin").addEventListener("change", (event) => {
  showOrigins(event.target.checked);
  store("origins", event.target.checked);
});
$("open-settings").addEventListener("click", () => {
  fillSettings(settings);
  $("s-key").value = sessionStorage.getItem("specwire.key") ?? "";
  $("settings").showModal();
});
$("s-reset").addEventListener("click", () => fillSettings(DEFAULTS));
$("s-cancel").addEventListener("click", () => $("settings").close());
$("settings-form").addEventListener("submit", saveSettings);

applyTheme();
showOrigins(stored("origins") === true);
loadModel();
$("prompt").focus();
