//go:build unix

package servers

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Files that keep Debian's packages from starting services and from creating a
// cluster of their own while they are installed.
const (
	policyFile  = "/usr/sbin/policy-rc.d"
	clusterFile = "/etc/postgresql-common/createcluster.d/watermill-inbox.conf"
)

// install installs the packages of the kinds with apt, after saying so.
func install(ctx context.Context, missing []Kind) error {
	if len(missing) == 0 {
		return nil
	}
	var names []string
	for _, kind := range missing {
		names = append(names, packages[kind].debian)
	}
	return installPackages(ctx, names...)
}

func installPackages(ctx context.Context, names ...string) error {
	fmt.Fprintf(os.Stderr, "servers: %s not found on this machine: installing it with apt-get, without its system service, to run a private server from it\n", strings.Join(names, " and "))

	restorePolicy, err := replaceFile(policyFile, "#!/bin/sh\nexit 101\n", 0o755)
	if err != nil {
		return fmt.Errorf("servers: %w", err)
	}
	restoreCluster, err := replaceFile(clusterFile, "create_main_cluster = false\n", 0o644)
	if err != nil {
		return fmt.Errorf("servers: %w", errors.Join(err, restorePolicy()))
	}
	err = aptGet(ctx, os.Stderr, "update")
	if err == nil {
		err = aptGet(ctx, os.Stderr, append([]string{"install", "-y", "--no-install-recommends"}, names...)...)
	}
	if err = errors.Join(err, restoreCluster(), restorePolicy()); err != nil {
		return fmt.Errorf("servers: %w", err)
	}
	return nil
}

// aptGet runs apt-get without questions. Its output goes to the log of errors:
// our own output belongs to the command that the servers are for.
func aptGet(ctx context.Context, output io.Writer, arguments ...string) error {
	// Another apt-get at work is waited for, as on a machine that just booted.
	cmd := exec.CommandContext(ctx, "apt-get", append([]string{"-q", "-o", "DPkg::Lock::Timeout=300"}, arguments...)...)
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
	cmd.Stdout, cmd.Stderr = output, output
	// A package manager is asked to end, not killed in the middle.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("apt-get %s: %w", strings.Join(arguments, " "), errors.Join(context.Cause(ctx), err))
	}
	return nil
}

// replaceFile puts content in the place of a file, and its folders, and returns
// what puts back the state before.
func replaceFile(path, content string, mode fs.FileMode) (restore func() error, err error) {
	var made string // the topmost folder that was not there
	for folder := filepath.Dir(path); !exists(folder); folder = filepath.Dir(folder) {
		made = folder
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}

	before, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		restore = func() error {
			err := os.Remove(path)
			// Only as far as nothing else has come to lie there.
			for folder := filepath.Dir(path); made != "" && len(folder) >= len(made); folder = filepath.Dir(folder) {
				if os.Remove(folder) != nil {
					break
				}
			}
			return err
		}
	case err != nil:
		return nil, err
	default:
		info, err := os.Stat(path)
		if err != nil {
			return nil, err
		}
		restore = func() error { return writeFile(path, before, info.Mode().Perm()) }
	}
	if err := writeFile(path, []byte(content), mode); err != nil {
		return nil, errors.Join(err, restore())
	}
	return restore, nil
}

// writeFile is os.WriteFile with the mode also for a file that exists.
func writeFile(path string, content []byte, mode fs.FileMode) error {
	if err := os.WriteFile(path, content, mode); err != nil {
		return err
	}
	return os.Chmod(path, mode)
}
