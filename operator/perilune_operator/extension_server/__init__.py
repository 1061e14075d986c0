"""The extension server of Envoy Gateway, by which it takes standard InferencePools as backends.

    HTTPRoute ─▶ Envoy Gateway ─▶ PostRouteModify, PostClusterModify, PostTranslateModify ─▶ Envoys

main        the program perilune-extension-server: gRPC
hooks       the answers, pure: message in, message out
pickers     what an InferencePool says of its endpoint picker, and Envoy's cluster of it
recent      which pickers were asked lately

It asks nobody: Envoy Gateway sends the InferencePool with each route and cluster, and the route's own
configuration names the picker in the last call. All that it keeps are the pickers of the last hour. So any
number of them may run, and it has no rights in the cluster.
"""
