package amqp_test

import (
	"bufio"
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"

	inbox "github.com/devmappa/watermill-inbox"
	inboxamqp "github.com/devmappa/watermill-inbox/amqp"
	"github.com/devmappa/watermill-inbox/internal/integration/testdb"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// consumerVariable makes the test program a consumer of its own, the one that tests kill. Its value is a
// consumerConfig.
const consumerVariable = "INBOX_TEST_CONSUMER"

type consumerConfig struct {
	PostgreSQL, AMQP, Queue, Poison string
	Then                            string // what the handler does after its INSERT, one of the constants below
}

const (
	hang          = "hang"           // for ever, deaf for its context
	returnContext = "return context" // wait for the context and return its error
	returnNothing = "return nothing" // wait for the context and return nil
	returnError   = "return error"   // wait for the context and return an error of its own
)

// consumerMain is the whole program: the documented order, and SIGTERM as in the example. It prints "inserted"
// when its handler has done that. It ends with its parent.
func consumerMain(configuration string) (status int) {
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(3)
	}()
	var config consumerConfig
	err := json.Unmarshal([]byte(configuration), &config)
	if err == nil {
		err = config.run()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func (c consumerConfig) run() error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	db, err := sql.Open("postgres", c.PostgreSQL)
	if err != nil {
		return err
	}
	defer db.Close()
	repository, err := inboxsql.NewRepository(db, inboxsql.Options{SchemaAdapter: inboxsql.DefaultPostgreSQLSchema{}})
	if err != nil {
		return err
	}
	once, err := inbox.NewMiddleware(repository, inbox.Options{})
	if err != nil {
		return err
	}
	config := amqp.NewDurableQueueConfig(c.AMQP)
	config.Marshaler = inboxamqp.Marshaler{}
	config.Publish.ConfirmDelivery = true
	config.TopologyBuilder = declared{}
	subscriber, err := amqp.NewSubscriber(config, watermill.NopLogger{})
	if err != nil {
		return err
	}
	defer subscriber.Close()
	publisher, err := amqp.NewPublisher(config, watermill.NopLogger{})
	if err != nil {
		return err
	}
	defer publisher.Close()
	order, err := documentedOrder(publisher, c.Poison, lastAttempt, once.Middleware)
	if err != nil {
		return err
	}
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: patience}, watermill.NopLogger{})
	if err != nil {
		return err
	}
	router.AddMiddleware(order...)
	router.AddConsumerHandler(handlerName, c.Queue, subscriber, func(msg *message.Message) error {
		tx, _ := inboxsql.TxFromContext(msg.Context())
		if _, err := tx.ExecContext(msg.Context(), `INSERT INTO effects VALUES ($1)`, msg.UUID); err != nil {
			return err
		}
		fmt.Println("inserted")
		if c.Then == hang {
			select {}
		}
		<-msg.Context().Done()
		switch c.Then {
		case returnContext:
			return msg.Context().Err()
		case returnError:
			return errors.New("interrupted")
		}
		return nil
	})
	return router.Run(ctx)
}

// declared is the topology of queues that are there.
type declared struct{ amqp.DefaultTopologyBuilder }

func (declared) BuildTopology(*amqp091.Channel, string, string, amqp.Config, watermill.LoggerAdapter) error {
	return nil
}

// consumer is such a process.
type consumer struct {
	*service
	process     *os.Process
	application string // the name of its sessions in PostgreSQL
	lines       chan string
	ended       chan error // as of exec.Cmd.Wait
	messages    *bytes.Buffer
}

// startProcess starts a process that consumes the service's queue. It is gone at the end of the test.
func (s *service) startProcess(then string) *consumer {
	s.Helper()
	program, err := os.Executable()
	if err != nil {
		s.Fatal(err)
	}
	c := &consumer{
		service: s, application: "inbox_" + testdb.RandomName(),
		lines: make(chan string, 1000), ended: make(chan error, 1), messages: &bytes.Buffer{},
	}
	configuration, err := json.Marshal(consumerConfig{
		PostgreSQL: withApplication(s, s.db.URL, c.application), AMQP: s.uri, Queue: s.queue, Poison: s.poison, Then: then,
	})
	if err != nil {
		s.Fatal(err)
	}
	cmd := exec.Command(program)
	cmd.Env = append(os.Environ(), consumerVariable+"="+string(configuration),
		"GORACE=atexit_sleep_ms=0 "+os.Getenv("GORACE")) // the race detector's exit takes a second
	cmd.Stderr = c.messages
	stdin, err := cmd.StdinPipe()
	if err != nil {
		s.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		s.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		s.Fatal(err)
	}
	c.process = cmd.Process
	var reader sync.WaitGroup
	reader.Add(1)
	go func() {
		defer reader.Done()
		for scanner := bufio.NewScanner(stdout); scanner.Scan(); {
			c.lines <- scanner.Text()
		}
		c.ended <- cmd.Wait()
		close(c.ended)
	}()
	s.Cleanup(func() {
		_ = c.process.Kill()
		reader.Wait()
		_ = stdin.Close()
		if s.Failed() {
			s.Logf("the consumer process said: %s", c.messages)
		}
	})
	return c
}

// waitForInsert waits until the process is in its handler and has a transaction with an effect open.
func (c *consumer) waitForInsert() {
	c.Helper()
	select {
	case line := <-c.lines:
		if line != "inserted" {
			c.Fatalf("the consumer process says %q", line)
		}
	case err := <-c.ended:
		c.Fatalf("the consumer process ended: %v: %s", err, c.messages)
	case <-time.After(patience):
		c.Fatalf("waited %s for the consumer process", patience)
	}
	c.waitForSessions(c.application, inTransaction, 1)
	c.wantEffects()
}

// signal sends the process a signal and returns how it ended and how long that took.
func (c *consumer) signal(signal syscall.Signal) (time.Duration, error) {
	c.Helper()
	begin := time.Now()
	if err := c.process.Signal(signal); err != nil {
		c.Fatal(err)
	}
	err := await(c, c.ended, "the consumer process to end")
	return time.Since(begin), err
}
