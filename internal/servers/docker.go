//go:build unix

package servers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"
)

// container is one service of the repository's docker-compose.yml, under a
// project name and a port of its own: what a person has started with the same
// file stays as it is.
type container struct {
	kind    Kind
	file    string
	project string
	port    int
}

// startContainer starts the kind's service and waits until it is healthy.
func startContainer(ctx context.Context, kind Kind) (*container, error) {
	directory, err := os.Getwd()
	if err != nil {
		return nil, err
	}
	file, err := composeFile(directory)
	if err != nil {
		return nil, err
	}
	ports, err := freePorts(1)
	if err != nil {
		return nil, err
	}
	c := &container{
		kind: kind, file: file, port: ports[0],
		project: folderPrefix + string(kind) + "-" + strconv.Itoa(ports[0]),
	}
	// Pulling an image takes minutes: let the user see it.
	up := c.compose(ctx, "up", "--detach", "--wait", string(kind))
	up.Stdout, up.Stderr = os.Stderr, os.Stderr
	if err := up.Run(); err != nil {
		return nil, errors.Join(fmt.Errorf("servers: docker compose up: %w", err), c.Stop())
	}
	return c, nil
}

// Stop removes the container and its data.
func (c *container) Stop() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	return run(ctx, c.compose(ctx, "down", "--volumes", "--timeout", "5"))
}

// address is the address of the service as the compose file sets it up.
func (c *container) address() string {
	if c.kind == KindRabbitMQ {
		return fmt.Sprintf("amqp://guest:guest@%s/", loopback(c.port))
	}
	return fmt.Sprintf("postgres://postgres:postgres@%s/postgres?sslmode=disable", loopback(c.port))
}

// compose is a docker compose command for this container.
func (c *container) compose(ctx context.Context, arguments ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "docker", append([]string{"compose", "--file", c.file, "--project-name", c.project}, arguments...)...)
	port := strconv.Itoa(c.port)
	cmd.Env = append(os.Environ(), "POSTGRES_PORT="+port, "RABBITMQ_PORT="+port)
	return cmd
}

// composeFile is the repository's compose file, sought from directory upwards:
// tests run in their package's folder. The examples have compose files of their
// own, so the repository's is known by what lies beside it.
func composeFile(directory string) (string, error) {
	for {
		file := filepath.Join(directory, "docker-compose.yml")
		if exists(file) && exists(filepath.Join(directory, "internal", "servers")) {
			return file, nil
		}
		parent := filepath.Dir(directory)
		if parent == directory {
			return "", errors.New("servers: no docker-compose.yml of this repository in this folder or above it")
		}
		directory = parent
	}
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
