//go:build unix

package main

import (
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"net/url"
	"os"
	"sync/atomic"
	"time"

	"github.com/lib/pq"
	amqp091 "github.com/rabbitmq/amqp091-go"
)

// stage is what a run has on the two servers for itself: a schema and two queues.
type stage struct {
	postgresURL string
	amqpURI     string
	name        string // of the schema and the queue
	admin       *sql.DB
	conn        *amqp091.Connection
	published   atomic.Int64 // messages that the broker has confirmed
}

func newStage(ctx context.Context) (_ *stage, err error) {
	s := &stage{
		postgresURL: os.Getenv("WATERMILL_TEST_POSTGRES_URL"),
		amqpURI:     os.Getenv("WATERMILL_TEST_AMQP_URI"),
		name:        "inbox_demo_" + randomName(),
	}
	if s.postgresURL == "" || s.amqpURI == "" {
		return nil, errors.New("WATERMILL_TEST_POSTGRES_URL and WATERMILL_TEST_AMQP_URI are not both set; make demo-amqp " +
			"sets them, and so does: go run ./internal/servers/withservers go run ./internal/demo")
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.remove())
		}
	}()
	if s.admin, err = sql.Open("postgres", s.postgresURL); err != nil {
		return nil, err
	}
	if s.postgresURL, err = withSearchPath(s.postgresURL, s.name); err != nil {
		return nil, err
	}
	if _, err := s.admin.ExecContext(ctx, `CREATE SCHEMA `+pq.QuoteIdentifier(s.name)); err != nil {
		return nil, fmt.Errorf("PostgreSQL: %w", err)
	}
	if s.conn, err = amqp091.Dial(s.amqpURI); err != nil {
		return nil, fmt.Errorf("RabbitMQ: %w", err)
	}
	// The consumers declare it in the same way. Messages that are published before would be lost.
	return s, s.onChannel(func(channel *amqp091.Channel) error {
		_, err := channel.QueueDeclare(s.name, true, false, false, false, nil)
		return err
	})
}

// remove removes what newStage and the consumers made.
func (s *stage) remove() error {
	var errs []error
	if s.conn != nil {
		errs = append(errs, s.onChannel(func(channel *amqp091.Channel) error {
			_, err := channel.QueueDelete(s.name, false, false, false)
			_, poisonErr := channel.QueueDelete(s.poisonQueue(), false, false, false)
			return errors.Join(err, poisonErr)
		}), s.conn.Close())
	}
	if s.admin != nil {
		ctx, cancel := context.WithTimeout(context.Background(), stopLimit)
		defer cancel()
		_, err := s.admin.ExecContext(ctx, `DROP SCHEMA IF EXISTS `+pq.QuoteIdentifier(s.name)+` CASCADE`)
		errs = append(errs, err, s.admin.Close())
	}
	return errors.Join(errs...)
}

func (s *stage) poisonQueue() string { return s.name + "_poison" }

// environ is what a consumer needs to know.
func (s *stage) environ() []string {
	return []string{"POSTGRES_URL=" + s.postgresURL, "AMQP_URI=" + s.amqpURI, "QUEUE=" + s.name}
}

// waitUntilIdle waits until nobody has said anything since the queue was seen to be empty. The broker
// does not tell when that happens, so it has to be asked.
func (s *stage) waitUntilIdle(ctx context.Context, tally *tally) error {
	said := -1
	for {
		state, err := s.inspect()
		if err != nil {
			return err
		}
		lines := tally.counts().lines
		if state.Messages == 0 && lines == said {
			return nil
		}
		said = lines
		if err := pause(ctx, 100*time.Millisecond); err != nil {
			return err
		}
	}
}

// left is the number of messages in the queue once no consumer holds any.
func (s *stage) left(ctx context.Context) (int, error) {
	for {
		state, err := s.inspect()
		if err != nil || state.Consumers == 0 {
			return state.Messages, err
		}
		if err := pause(ctx, 10*time.Millisecond); err != nil {
			return 0, err
		}
	}
}

func (s *stage) inspect() (state amqp091.Queue, err error) {
	err = s.onChannel(func(channel *amqp091.Channel) error {
		state, err = channel.QueueDeclarePassive(s.name, true, false, false, false, nil)
		return err
	})
	return state, err
}

func (s *stage) onChannel(do func(*amqp091.Channel) error) error {
	channel, err := s.conn.Channel()
	if err != nil {
		return err
	}
	defer channel.Close()
	return do(channel)
}

func withSearchPath(address, schema string) (string, error) {
	u, err := url.Parse(address)
	if err != nil {
		return "", errors.New("WATERMILL_TEST_POSTGRES_URL is not a URL") // the error would show the password
	}
	query := u.Query()
	query.Set("search_path", schema)
	u.RawQuery = query.Encode()
	return u.String(), nil
}

func randomName() string {
	name := make([]byte, 6)
	_, _ = rand.Read(name) // never fails
	return hex.EncodeToString(name)
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
