// A client in another language: @grpc/grpc-js with the service loaded from the .proto files.
// Arguments: folder that holds npuserve/_proto, address. Prints one JSON object.
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [root, address] = process.argv.slice(2);
const definition = loader.loadSync("npuserve/_proto/grpc_service.proto", {
  includeDirs: [root],
  longs: Number,
});
const { GRPCInferenceService } = grpc.loadPackageDefinition(definition).inference;
const client = new GRPCInferenceService(address, grpc.credentials.createInsecure(), {
  "grpc.max_receive_message_length": -1,
});

function call(name, request) {
  return new Promise((resolve, reject) =>
    client[name](request, (error, reply) => (error ? reject(error) : resolve(reply))),
  );
}

function request(model, data, id = "") {
  return {
    modelName: model,
    id,
    inputs: [{ name: "INPUT0", datatype: "UINT8", shape: [data.length] }],
    rawInputContents: [data],
  };
}

function stream(requests) {
  return new Promise((resolve, reject) => {
    const replies = [];
    const open = client.ModelStreamInfer();
    open.on("data", (reply) => replies.push(reply.errorMessage || reply.inferResponse.id));
    open.on("end", () => resolve(replies));
    open.on("error", reject);
    requests.forEach((each) => open.write(each));
    open.end();
  });
}

async function main() {
  const result = { live: (await call("ServerLive", {})).live };
  const small = await call("ModelInfer", request("echo", Buffer.from([1, 2, 3, 4]), "n1"));
  result.small = [small.id, [...small.rawOutputContents[0]]];
  const large = Buffer.alloc(6_000_000, 7);
  const echoed = await call("ModelInfer", request("echo", large));
  result.large = Buffer.compare(echoed.rawOutputContents[0], large);
  result.error = await call("ModelInfer", request("模型", Buffer.alloc(0))).catch((error) => [
    error.code,
    error.details,
  ]);
  result.stream = await stream(["1", "2", "3"].map((id) => request("echo", Buffer.alloc(8), id)));
  console.log(JSON.stringify(result));
  client.close();
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
