// Program conformance runs the conformance suite of the Gateway API inference extension on the cluster of KUBECONFIG.
// It takes the suite's flags and those of `go test` (-test.v). What the suite calls its base manifests is not applied:
// the caller has applied them, with endpoint pickers of its own.
package main

import (
	"testing"
	"time"

	"sigs.k8s.io/gateway-api-inference-extension/conformance"
)

func run(t *testing.T) {
	options := conformance.DefaultOptions(t)
	options.BaseManifests = "none"
	// Nothing here needs the five minutes that the suite waits for clouds' load balancers.
	options.TimeoutConfig.MaxTimeToConsistency = time.Minute
	options.TimeoutConfig.HTTPRouteMustHaveCondition = time.Minute
	options.TimeoutConfig.RouteMustHaveParents = time.Minute
	conformance.RunConformanceWithOptions(t, options)
}

func main() {
	every := func(_, _ string) (bool, error) { return true, nil }
	testing.Main(every, []testing.InternalTest{{Name: "Conformance", F: run}}, nil, nil)
}
