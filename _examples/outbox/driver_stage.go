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
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/lib/pq"
	amqp091 "github.com/rabbitmq/amqp091-go"

	"github.com/devmappa/watermill-inbox/internal/servers"
)

// stage is what a run has for itself: private servers, or schemas, queues and exchanges on given ones.
type stage struct {
	settings
	servers   *servers.Set
	ownBroker *servers.RabbitMQ // nil when it was given
	databases map[string]*sql.DB
}

const (
	ordersSchemaName   = "orders"
	invoicesSchemaName = "invoices"
	auditService       = "audit"
)

func newStage(ctx context.Context) (_ *stage, err error) {
	s := &stage{servers: &servers.Set{}, databases: make(map[string]*sql.DB)}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.remove())
		}
	}()
	if err := s.getServers(ctx); err != nil {
		return nil, err
	}
	name := make([]byte, 4)
	_, _ = rand.Read(name) // never fails
	s.prefix = "outbox_example_" + hex.EncodeToString(name) + "_"

	admin, err := sql.Open("postgres", s.postgresURL)
	if err != nil {
		return nil, err
	}
	s.databases[""] = admin
	for _, schema := range []string{ordersSchemaName, invoicesSchemaName} {
		if _, err := admin.ExecContext(ctx, `CREATE SCHEMA `+pq.QuoteIdentifier(s.prefix+schema)); err != nil {
			return nil, fmt.Errorf("PostgreSQL: %w", err)
		}
		if s.databases[schema], err = sql.Open("postgres", s.urlOf(schema)); err != nil {
			return nil, err
		}
	}
	if err := createOutbox(ctx, s.databases[ordersSchemaName]); err != nil {
		return nil, err
	}

	// A second subscriber to the events: its queue shows all that the forwarder has published.
	audit, err := amqp.NewSubscriber(eventsConfig(s.settings, auditService), watermill.NopLogger{})
	if err != nil {
		return nil, fmt.Errorf("RabbitMQ: %w", err)
	}
	return s, errors.Join(audit.SubscribeInitialize(s.bookedTopic()), audit.Close())
}

// getServers takes given addresses and starts what is missing. It holds the private broker itself, to kill it.
func (s *stage) getServers(ctx context.Context) error {
	began := time.Now()
	broker := make(chan error, 1)
	kinds := []servers.Kind{servers.KindPostgreSQL}
	if os.Getenv(servers.RabbitMQVariable) == "" {
		go func() {
			var err error
			s.ownBroker, err = servers.StartRabbitMQ(ctx)
			broker <- err
		}()
	} else {
		kinds = append(kinds, servers.KindRabbitMQ)
		broker <- nil
	}
	set, err := servers.Ensure(ctx, kinds...)
	if err := errors.Join(err, <-broker); err != nil {
		if set != nil {
			s.servers = set
		}
		return err
	}
	s.servers = set
	for _, server := range set.Servers {
		fmt.Println(server)
		if server.Kind == servers.KindPostgreSQL {
			s.postgresURL = server.Address
		} else {
			s.amqpURI = server.Address
		}
	}
	if s.ownBroker != nil {
		fmt.Printf("RabbitMQ %s: private server\n", s.ownBroker.Version())
		s.amqpURI = s.ownBroker.URI()
	}
	fmt.Printf("servers ready after %.1f s\n", time.Since(began).Seconds())
	return nil
}

// remove removes what newStage and the processes made.
func (s *stage) remove() error {
	var errs []error
	if s.databases[""] != nil {
		ctx, cancel := context.WithTimeout(context.Background(), stopLimit)
		defer cancel()
		for _, schema := range []string{ordersSchemaName, invoicesSchemaName} {
			_, err := s.databases[""].ExecContext(ctx, `DROP SCHEMA IF EXISTS `+pq.QuoteIdentifier(s.prefix+schema)+` CASCADE`)
			errs = append(errs, err)
		}
	}
	for _, db := range s.databases {
		errs = append(errs, db.Close())
	}
	switch {
	case s.ownBroker != nil:
		errs = append(errs, s.ownBroker.Stop())
	case s.amqpURI != "" && s.prefix != "":
		errs = append(errs, s.onChannel(func(channel *amqp091.Channel) error {
			var errs []error
			for _, queue := range append(s.poisonQueues(), s.ordersTopic(), s.invoicesQueue(), s.auditQueue()) {
				_, err := channel.QueueDelete(queue, false, false, false)
				errs = append(errs, err)
			}
			return errors.Join(append(errs,
				channel.ExchangeDelete(s.bookedTopic(), false, false),
				channel.ExchangeDelete(s.bookedTopic()+"_poison", false, false))...)
		}))
	}
	return errors.Join(append(errs, s.servers.Close())...)
}

func (s *stage) invoicesQueue() string { return s.bookedTopic() + "_invoices" }
func (s *stage) auditQueue() string    { return s.bookedTopic() + "_" + auditService }
func (s *stage) poisonQueues() []string {
	return []string{s.ordersTopic() + "_poison", s.bookedTopic() + "_poison_invoices"}
}

// environ is what a process is told. The forwarder reads what the orders service writes.
func (s *stage) environ(role string) []string {
	schema := ordersSchemaName
	if role == "invoices" {
		schema = invoicesSchemaName
	}
	return []string{"POSTGRES_URL=" + s.urlOf(schema), "AMQP_URI=" + s.amqpURI, "TOPIC_PREFIX=" + s.prefix, "DEBUG=1", "END_WITH_STDIN=1"}
}

// urlOf is the address of PostgreSQL with a schema as the only one that is seen.
func (s *stage) urlOf(schema string) string {
	u, err := url.Parse(s.postgresURL)
	if err != nil {
		return s.postgresURL // getServers has parsed it
	}
	query := u.Query()
	query.Set("search_path", s.prefix+schema)
	u.RawQuery = query.Encode()
	return u.String()
}

// pending is the number of messages that wait for a role and are in no consumer's hands.
func (s *stage) pending(ctx context.Context, role string) (pending int, err error) {
	if queue := s.queueOf(role); queue != "" {
		state, err := s.inspect(queue)
		return state.Messages, err
	}
	err = s.databases[ordersSchemaName].QueryRowContext(ctx, `
		SELECT count(*) FROM watermill_outbox m LEFT JOIN watermill_offsets_outbox o ON o.consumer_group = 'forwarder'
		WHERE o.consumer_group IS NULL OR (m.transaction_id, m."offset") > (o.last_processed_transaction_id, o.offset_acked)`,
	).Scan(&pending)
	return pending, err
}

// left is the same once the role has stopped: what its consumers held is then in the queue again.
func (s *stage) left(ctx context.Context, role string) (int, error) {
	for queue := s.queueOf(role); queue != ""; {
		if state, err := s.inspect(queue); err != nil || state.Consumers == 0 {
			break
		}
		if err := pause(ctx, 10*time.Millisecond); err != nil {
			return 0, err
		}
	}
	return s.pending(ctx, role)
}

// queueOf is empty for the forwarder, which reads a table.
func (s *stage) queueOf(role string) string {
	return map[string]string{"orders": s.ordersTopic(), "invoices": s.invoicesQueue()}[role]
}

func (s *stage) inspect(queue string) (state amqp091.Queue, err error) {
	err = s.onChannel(func(channel *amqp091.Channel) error {
		state, err = channel.QueueDeclarePassive(queue, true, false, false, false, nil)
		return err
	})
	return state, err
}

func (s *stage) onChannel(do func(*amqp091.Channel) error) error {
	conn, err := amqp091.Dial(s.amqpURI)
	if err != nil {
		return err
	}
	defer conn.Close()
	channel, err := conn.Channel()
	if err != nil {
		return err
	}
	return do(channel)
}
