//go:build unix

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
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
)

// The queues, and the consumers named after them. Each payment goes to bookings and to audits, under one
// id; a booking produces an event, which goes to invoices and to the tap, where nobody consumes it.
const (
	bookings = "bookings"
	audits   = "audits"
	invoices = "invoices"
	events   = "events" // an exchange
	tap      = "tap"
)

const (
	inFlight = 3

	// heartbeat is the broker's patience: it cuts a client off that is silent for two of them.
	heartbeat = 2 * time.Second
)

// workerConfig is what a worker is told, in its environment.
type workerConfig struct {
	Number int
	Store  string
	DSN    string
	AMQP   string
	Inbox  string
	Away   string // a file, see reapedPublisher
	Death  death
}

const workerVariable = "TORTURE_WORKER"

// payment is a message of the queues, and event what a booking produces.
type payment struct {
	ID    string
	Cents int64
}

type event struct{ Payment string }

// work is the worker process: a router as people deploy it, with a reaper at every step.
func work(encoded string) error {
	var config workerConfig
	if err := json.Unmarshal([]byte(encoded), &config); err != nil {
		return err
	}
	// It ends with the driver, whose end closes this pipe.
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(3)
	}()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()

	reaper := &reaper{death: config.Death}
	store, err := openStore(ctx, config.Store, config.DSN, inFlight*3+2) // with the marks and the relay
	if err != nil {
		return err
	}
	defer store.close()
	logger := &logger{}
	once, err := newInbox(config.Inbox, store, reaper, logger)
	if err != nil {
		return err
	}
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: 20 * time.Second}, logger)
	if err != nil {
		return err
	}
	queues := func() (message.Subscriber, error) {
		inner, err := amqp.NewSubscriber(amqpConfig(config.AMQP), logger)
		if err != nil {
			return nil, err
		}
		return inboxamqp.Concurrent(inner, inFlight)
	}
	publisher, err := newPublisher(config, reaper, logger)
	if err != nil {
		return err
	}
	defer publisher.Close()
	router.AddMiddleware(reaper.aroundAcknowledgement)
	if err := once.addTo(router); err != nil {
		return err
	}
	handlers := handlers{store: store, reaper: reaper}
	var subscribers [3]message.Subscriber
	for i := range subscribers {
		if subscribers[i], err = queues(); err != nil {
			return err
		}
	}
	router.AddHandler(bookings, bookings, subscribers[0], events, publisher, handlers.book)
	router.AddConsumerHandler(audits, audits, subscribers[1], handlers.audit)
	router.AddConsumerHandler(invoices, invoices, subscribers[2], handlers.invoice)

	var relaying sync.WaitGroup
	defer relaying.Wait() // before the store and the publisher are closed
	relayContext, endRelay := context.WithCancel(ctx)
	defer endRelay() // also when the router ends by itself
	if once.relay != "" {
		relay, err := newRelay(store, once.relay, publisher, logger)
		if err != nil {
			return err
		}
		relaying.Go(func() {
			if err := relay.Run(relayContext); relayContext.Err() == nil {
				fmt.Fprintln(os.Stderr, "the relay ended by itself:", err)
			}
		})
	}
	context.AfterFunc(ctx, func() { _ = router.Close() })
	go func() {
		<-router.Running()
		say("up")
	}()
	if err := router.Run(context.WithoutCancel(ctx)); err != nil {
		return err
	}
	closing, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_ = once.close(closing)
	if ctx.Err() == nil {
		return errors.New("the router stopped by itself")
	}
	return nil
}

// newRelay returns one that is in a hurry, but leaves the router's publish its time.
func newRelay(s store, consumer string, publisher *reapedPublisher, logger watermill.LoggerAdapter) (*inbox.Relay, error) {
	return inbox.NewRelay(s.repository(), inbox.RelayOptions{
		Publishers: map[string]message.Publisher{consumer: publisher.ofRelay()},
		Age:        2 * publishBackOff,
		Interval:   time.Second,
		Lease:      5 * time.Second,
		Logger:     logger,
	})
}

// amqpConfig is for the queues, classic ones and quorum queues.
func amqpConfig(uri string) amqp.Config {
	config := amqp.NewDurableQueueConfig(uri)
	config.Connection.AmqpConfig = &amqp091.Config{Heartbeat: heartbeat}
	config.Marshaler = inboxamqp.Marshaler{}
	// The driver has declared the queues; a queue that it deletes is missing until it declares it again.
	config.TopologyBuilder = noTopology{}
	config.Publish.ConfirmDelivery = true
	return config
}

type noTopology struct{}

func (noTopology) BuildTopology(*amqp091.Channel, string, string, amqp.Config, watermill.LoggerAdapter) error {
	return nil
}

func (noTopology) ExchangeDeclare(*amqp091.Channel, string, amqp.Config) error { return nil }

func newPublisher(worker workerConfig, reaper *reaper, logger watermill.LoggerAdapter) (*reapedPublisher, error) {
	config := amqpConfig(worker.AMQP)
	config.Exchange.GenerateName = func(topic string) string { return topic }
	publisher, err := amqp.NewPublisher(config, logger)
	if err != nil {
		return nil, err
	}
	return &reapedPublisher{Publisher: publisher, reaper: reaper, step: routerPublish, away: worker.Away}, nil
}

// handlers are the users' part.
type handlers struct {
	store  store
	reaper *reaper
}

func (h handlers) book(msg *message.Message) ([]*message.Message, error) {
	var p payment
	if err := json.Unmarshal(msg.Payload, &p); err != nil {
		return nil, err
	}
	say("run", bookings)
	// Rows to be cut in the middle of.
	if err := h.store.read(msg.Context(), `SELECT id FROM accounts`); err != nil {
		return nil, err
	}
	h.reaper.pass("before effect")
	if err := h.store.write(msg.Context(), `INSERT INTO ledger (payment, cents) VALUES ($1, $2)`, p.ID, p.Cents); err != nil {
		return nil, err
	}
	h.reaper.pass("after effect")
	payload, err := json.Marshal(event{Payment: p.ID})
	// A new UUID in each run of the handler: only the one that was committed may ever be seen.
	return []*message.Message{message.NewMessage(watermill.NewUUID(), payload)}, err
}

func (h handlers) audit(msg *message.Message) error {
	var p payment
	if err := json.Unmarshal(msg.Payload, &p); err != nil {
		return err
	}
	say("run", audits)
	h.reaper.pass("before effect")
	defer h.reaper.pass("after effect")
	return h.store.write(msg.Context(), `INSERT INTO audits (payment) VALUES ($1)`, p.ID)
}

func (h handlers) invoice(msg *message.Message) error {
	var e event
	if err := json.Unmarshal(msg.Payload, &e); err != nil {
		return err
	}
	say("run", invoices)
	h.reaper.pass("before effect")
	defer h.reaper.pass("after effect")
	return h.store.write(msg.Context(), `INSERT INTO invoices (payment, event) VALUES ($1, $2)`, e.Payment, msg.UUID)
}

// say tells the driver.
func say(words ...any) { fmt.Println(words...) }

// logger tells the driver what became of messages, and keeps errors for its verbose mode.
type logger struct{ fields watermill.LogFields }

func (l *logger) Debug(text string, fields watermill.LogFields) {
	switch text {
	case "Message processed", "Message duplicate", "Message replayed", "Message failed":
		say("inbox", text[len("Message "):])
	}
}

func (l *logger) Error(text string, err error, fields watermill.LogFields) {
	fmt.Fprintln(os.Stderr, text, err, l.fields.Add(fields))
}

func (l *logger) Info(string, watermill.LogFields)  {}
func (l *logger) Trace(string, watermill.LogFields) {}
func (l *logger) With(fields watermill.LogFields) watermill.LoggerAdapter {
	return &logger{fields: l.fields.Add(fields)}
}
