// Streams one answer over GenerateStream and prints what arrived as JSON:
//
//     node stream_answer.js HOST:PORT PROTO_DIRECTORY '{"prompt":"Hello"}' [DEADLINE_SECONDS]
//
// {"text": ..., "events": {"delta": 3, ...}, "finish_reason": ..., "summary": {...}, "status": {"code": 0, ...}}
// A failed call is an answer too: its status is printed, and the exit code is 0. Exit code 2 means wrong arguments.
"use strict";

const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const protoLoader = require("@grpc/proto-loader");

const [address, protoDirectory, requestJson, deadlineSeconds = "60"] = process.argv.slice(2);
if (!address || !protoDirectory || !requestJson) {
  console.error("usage: stream_answer.js HOST:PORT PROTO_DIRECTORY REQUEST_JSON [DEADLINE_SECONDS]");
  process.exit(2);
}

const definition = protoLoader.loadSync(path.join("twinstage", "v1", "generation.proto"), {
  includeDirs: [protoDirectory],
  keepCase: true,
  longs: Number,
  enums: String,
  oneofs: true,
  defaults: true, // proto3: a field that is not on the wire has its default, an empty text among them
});
const { GenerationService } = grpc.loadPackageDefinition(definition).twinstage.v1;

const client = new GenerationService(address, grpc.credentials.createInsecure());
const deadline = new Date(Date.now() + Number(deadlineSeconds) * 1000);
const call = client.GenerateStream(JSON.parse(requestJson), { deadline });

const answer = { text: "", events: {}, order: [], finish_reason: null, prompt_info: null, summary: null };

call.on("data", (response) => {
  const event = response.event;
  answer.events[event] = (answer.events[event] || 0) + 1;
  if (answer.order.at(-1) !== event) answer.order.push(event);
  if (event === "prompt_info") answer.prompt_info = response.prompt_info;
  if (event === "delta") answer.text += response.delta.text;
  if (event === "finished") answer.finish_reason = response.finished.finish_reason;
  if (event === "summary") answer.summary = response.summary;
});
call.on("error", () => {}); // the status, which follows, says the same
call.on("status", (status) => {
  const metadata = status.metadata.getMap();
  answer.status = {
    code: status.code,
    name: grpc.status[status.code],
    details: status.details,
    metadata: Object.keys(metadata).sort(),
  };
  console.log(JSON.stringify(answer));
  client.close();
});
