//go:build unix

package servers

import (
	"bufio"
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/devmappa/watermill-inbox/internal/servers"
)

// build builds the command.
func build(t *testing.T) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "withservers")
	output, err := exec.Command("go", "build", "-o", program, "github.com/devmappa/watermill-inbox/internal/servers/withservers").CombinedOutput()
	if err != nil {
		t.Fatalf("go build: %v\n%s", err, output)
	}
	return program
}

// status is the exit status of a command that has been waited for.
func status(t *testing.T, err error) int {
	t.Helper()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		return exit.ExitCode()
	default:
		t.Fatal(err)
		return 0
	}
}

func TestCommandStatusAndVariables(t *testing.T) {
	program := build(t)
	const address = "postgres://u@127.0.0.1:1/x"
	tests := []struct {
		name      string
		arguments []string
		status    int
		output    string
	}{
		{"success", []string{"-only", "postgres", "sh", "-c", "echo $WATERMILL_TEST_POSTGRES_URL"}, 0, address + "\n"},
		{"failure", []string{"-only", "postgres", "sh", "-c", "exit 7"}, 7, ""},
		{"signal", []string{"-only", "postgres", "sh", "-c", "kill -9 $$"}, 128 + 9, ""},
		{"no such command", []string{"-only", "postgres", "no-such-command"}, 127, ""},
		{"no such server", []string{"-only", "redis", "true"}, 2, ""},
		{"no command", nil, 2, ""},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			cmd := exec.Command(program, test.arguments...)
			cmd.Env = append(os.Environ(), servers.PostgreSQLVariable+"="+address)
			output, err := cmd.Output()
			if got := status(t, err); got != test.status || string(output) != test.output {
				t.Errorf("status %d, output %q, want %d, %q", got, output, test.status, test.output)
			}
		})
	}
}

func TestCommandStopsServersAtSignals(t *testing.T) {
	program := build(t)
	tests := []struct {
		signal    syscall.Signal
		arguments []string
		servers   int
	}{
		{syscall.SIGINT, []string{"-only", "postgres"}, 1},
		{syscall.SIGTERM, []string{"-only", "postgres"}, 1},
		{syscall.SIGKILL, nil, 2},
	}
	for _, test := range tests {
		signal := test.signal
		t.Run(signal.String(), func(t *testing.T) {
			if signal == syscall.SIGKILL && runtime.GOOS != "linux" {
				return // other systems do not tell servers that their parent has ended
			}
			folder := ownTemp(t)
			// In the shell's place, so that the end of our command is its end.
			cmd := exec.Command(program, append(test.arguments, "sh", "-c", "echo up; exec sleep 600")...)
			// Not in the terminal's foreground, where withservers leaves it to
			// the terminal to send an interrupt to the command.
			cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
			var messages bytes.Buffer
			cmd.Stderr = &messages
			stdout, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			if line, err := bufio.NewReader(stdout).ReadString('\n'); err != nil || line != "up\n" {
				t.Errorf("the command said %q, %v", line, err)
			}
			if err := cmd.Process.Signal(signal); err != nil {
				t.Fatal(err)
			}
			err = cmd.Wait()
			assertNoProcess(t, folder)
			if signal == syscall.SIGKILL {
				removeOrphans(t, folder)
				return
			}
			if got := status(t, err); got != 128+int(signal) {
				t.Errorf("status %d, want %d", got, 128+int(signal))
			}
			if got := messages.String(); strings.Count(got, "private server, 127.0.0.1:") != test.servers {
				t.Errorf("it said %q", got)
			}
		})
	}
}

// removeOrphans has the next start of a server remove the folders that a killed
// owner left.
func removeOrphans(t *testing.T, folder string) {
	t.Helper()
	if left, _ := filepath.Glob(filepath.Join(folder, "*")); len(left) != 2 {
		t.Errorf("left are %q, want two folders", left)
	}
	server := startPostgreSQL(t)
	if left, _ := filepath.Glob(filepath.Join(folder, "*")); len(left) != 1 {
		t.Errorf("left are %q, want the folder of the new server only", left)
	}
	if err := server.Stop(); err != nil {
		t.Error(err)
	}
}
