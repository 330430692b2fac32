//go:build unix

package servers

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

// machine is what the choice of a server depends on. Tests replace it.
type machine struct {
	getenv   func(name string) string
	lookPath func(program string) (string, error)
	glob     func(pattern string) ([]string, error)
	docker   func(ctx context.Context) bool // an engine answers, with compose
	isRoot   bool
	isDebian bool
}

// thisMachine is the machine that we run on.
func thisMachine() machine {
	_, debian := os.Stat("/etc/debian_version")
	_, apt := exec.LookPath("apt-get")
	return machine{
		getenv:   os.Getenv,
		lookPath: exec.LookPath,
		glob:     filepath.Glob,
		docker:   dockerAnswers,
		isRoot:   os.Geteuid() == 0,
		isDebian: debian == nil && apt == nil,
	}
}

// dockerAnswers reports whether an engine and the compose plugin are there, not
// only the client program.
func dockerAnswers(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	return exec.CommandContext(ctx, "docker", "info").Run() == nil &&
		exec.CommandContext(ctx, "docker", "compose", "version").Run() == nil
}
