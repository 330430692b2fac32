//go:build unix

package main

import (
	"fmt"
	"os"
	"testing"
)

// TestMain is a worker when it is started as one.
func TestMain(m *testing.M) {
	if config, isWorker := os.LookupEnv(workerVariable); isWorker {
		if err := work(config); err != nil {
			fmt.Fprintln(os.Stderr, "stopped:", err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}
