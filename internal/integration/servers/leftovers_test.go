//go:build unix

package servers

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// ownTemp gives the test a temporary folder of its own, which the servers' user
// can reach, and no addresses of servers. When the test ends the folder must be
// empty and no process may have to do with it.
func ownTemp(t *testing.T) (folder string) {
	t.Helper()
	folder, err := os.MkdirTemp("", "servers-test-")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(folder, 0o711); err != nil {
		t.Fatal(err)
	}
	t.Setenv("TMPDIR", folder)
	t.Setenv("WATERMILL_TEST_POSTGRES_URL", "")
	t.Setenv("WATERMILL_TEST_AMQP_URI", "")
	t.Cleanup(func() {
		assertNoProcess(t, folder)
		if err := os.Remove(folder); err != nil {
			t.Errorf("something is left: %v", err)
			os.RemoveAll(folder)
		}
	})
	return folder
}

// assertNoProcess fails the test when a process works in the folder or has it in
// its environment. It looks where there is a /proc. The kernel needs a moment to
// clear away the helpers of a process that has been killed.
func assertNoProcess(t *testing.T, folder string) {
	t.Helper()
	var left []string
	deadline := time.Now().Add(10 * time.Second)
	for {
		if left = processesOf(folder); len(left) == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Errorf("processes are left: %q", left)
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// processesOf lists the command lines of the processes that have to do with the
// folder, ours excepted.
func processesOf(folder string) []string {
	var found []string
	processes, _ := filepath.Glob("/proc/[0-9]*")
	self, _ := os.Readlink("/proc/self")
	for _, process := range processes {
		if filepath.Base(process) == self {
			continue
		}
		environment, _ := os.ReadFile(process + "/environ")
		directory, _ := os.Readlink(process + "/cwd")
		if bytes.Contains(environment, []byte(folder)) || bytes.Contains([]byte(directory), []byte(folder)) {
			command, _ := os.ReadFile(process + "/cmdline")
			found = append(found, string(bytes.ReplaceAll(command, []byte{0}, []byte{' '})))
		}
	}
	return found
}
