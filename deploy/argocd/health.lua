-- Health of an InferenceService for Argo CD: resource.customizations.health.inference.argosy.dev_InferenceService.
-- Progressing until the operator has observed this generation and its replicas are routable, Degraded where a person has
-- to act, Suspended while spec.paused keeps a change from being applied, a canary waits for a person, or a change of a
-- service at zero for the request that tries it. A service that spec.replicas: 0 stops is Healthy, as a Deployment is: a
-- sync waits for what is Suspended.
local health = {status = "Progressing", message = "waiting for the operator"}
local status = obj.status
if status == nil or status.conditions == nil then
  return health
end
if (status.observedGeneration or -1) < (obj.metadata.generation or 0) then
  return health
end
local conditions = {}
for _, condition in ipairs(status.conditions) do
  conditions[condition.type] = condition
end
local function message_of(condition)
  if condition.message == nil or condition.message == "" then
    return condition.reason
  end
  return condition.reason .. ": " .. condition.message
end
local ready = conditions.Ready
for _, kind in ipairs({"Stalled", "Degraded"}) do
  local condition = conditions[kind]
  if condition ~= nil and condition.status == "True" then
    health.status = "Degraded"
    health.message = message_of(condition)
    return health
  end
end
if ready == nil then
  return health
end
health.message = message_of(ready)
if ready.status == "True" then
  health.status = "Healthy"
elseif ready.reason == "CanaryHeld" or ready.reason == "Untried" or (obj.spec ~= nil and obj.spec.paused == true) then
  health.status = "Suspended"
end
return health
