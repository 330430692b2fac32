//go:build unix

package servers

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// fakeDocker puts a docker command first on the PATH that writes down how it was
// called and ends with the given status.
func fakeDocker(t *testing.T, status int) (calls func() []string) {
	t.Helper()
	folder := t.TempDir()
	record := filepath.Join(folder, "calls")
	script := "#!/bin/sh\necho \"$* POSTGRES_PORT=$POSTGRES_PORT\" >>" + record + "\nexit " + strconv.Itoa(status) + "\n"
	if err := os.WriteFile(filepath.Join(folder, "docker"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", folder+":"+os.Getenv("PATH"))
	return func() []string {
		content, err := os.ReadFile(record)
		if err != nil {
			t.Fatal(err)
		}
		return strings.Split(strings.TrimSpace(string(content)), "\n")
	}
}

func TestContainer(t *testing.T) {
	calls := fakeDocker(t, 0)
	if !dockerAnswers(context.Background()) {
		t.Error("an engine that answers is taken for none")
	}
	c, err := startContainer(context.Background(), KindPostgreSQL)
	if err != nil {
		t.Fatal(err)
	}
	port := strconv.Itoa(c.port)
	if got, want := c.address(), "postgres://postgres:postgres@127.0.0.1:"+port+"/postgres?sslmode=disable"; got != want {
		t.Errorf("address() = %q, want %q", got, want)
	}
	if err := c.Stop(); err != nil {
		t.Error(err)
	}
	got := calls()[2:]
	for i, want := range []string{" up --detach --wait postgres POSTGRES_PORT=" + port, " down --volumes --timeout 5 POSTGRES_PORT=" + port} {
		if !strings.HasSuffix(got[i], want) || !strings.Contains(got[i], "--project-name watermill-inbox-postgres-"+port) {
			t.Errorf("call %q, want one that ends with %q", got[i], want)
		}
	}
}

func TestContainerThatDoesNotStartIsRemoved(t *testing.T) {
	calls := fakeDocker(t, 1)
	if dockerAnswers(context.Background()) {
		t.Error("a client without an engine is taken for one")
	}
	if _, err := startContainer(context.Background(), KindRabbitMQ); err == nil {
		t.Error("no error")
	}
	if got := calls(); !strings.Contains(got[len(got)-1], " down ") {
		t.Errorf("calls %q do not end with the removal", got)
	}
}

func TestComposeFile(t *testing.T) {
	root := t.TempDir()
	deep := filepath.Join(root, "_examples", "cqrs")
	for _, folder := range []string{filepath.Join(root, "internal", "servers"), deep} {
		if err := os.MkdirAll(folder, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	want := filepath.Join(root, "docker-compose.yml")
	for _, file := range []string{want, filepath.Join(deep, "docker-compose.yml")} {
		if err := os.WriteFile(file, nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := composeFile(deep); err != nil || got != want {
		t.Errorf("composeFile() = %q, %v, want %q", got, err, want)
	}
	if _, err := composeFile(t.TempDir()); err == nil {
		t.Error("no error outside the repository")
	}
}
