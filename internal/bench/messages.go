package main

import (
	"context"
	"fmt"
	"net/url"
)

// The networks between a consumer and its database.
const (
	delayed = "network" // addedDelay per round trip
	direct  = "direct"
)

var networks = []string{delayed, direct}

var networkTitles = map[string]string{
	delayed: fmt.Sprintf("%g ms added per round trip", addedDelay.Seconds()*1000),
	direct:  "no network",
}

// through is the address of the place on the network.
func (b *bench) through(network string, p *place) (string, error) {
	if network == direct {
		return p.url, nil
	}
	parsed, err := url.Parse(p.url)
	if err != nil {
		return "", err
	}
	parsed.Host = b.network.address()
	return parsed.String(), nil
}

const (
	first     = "first"
	duplicate = "duplicate"
)

// addMessages adds first messages and duplicates of all variants. Plain transactions have no duplicates:
// there, too, they process first messages.
func (b *bench) addMessages(ctx context.Context) error {
	for _, kind := range []string{first, duplicate} {
		for _, network := range networks {
			title := "First messages, "
			if kind == duplicate {
				title = "Duplicates, relative to first messages of the plain transaction, "
			}
			s := &section{name: kind + "/" + network, title: title + networkTitles[network]}
			for _, workers := range b.options.workers {
				g := &group{setting: workersSetting(workers)}
				g.judged = s.name == chartSection && g.setting == chartSetting
				baselines := map[string]*subject{}
				for _, v := range variants {
					p, err := b.placeOf(ctx, v)
					if err != nil {
						return err
					}
					address, err := b.through(network, p)
					if err != nil {
						return err
					}
					slice := slice{workers: workers, measured: b.options.slice, newID: randomIDs.next, copies: kind == duplicate && v.claims}
					subject := &subject{name: v.name, baseline: baselines[v.baseline], rate: func(ctx context.Context) (float64, error) {
						return slice.rate(ctx, v, address, p)
					}}
					baselines[v.name] = subject
					g.subjects = append(g.subjects, subject)
				}
				s.groups = append(s.groups, g)
			}
			b.add(s)
		}
	}
	return nil
}

func workersSetting(n int) string {
	if n == 1 {
		return "1 worker"
	}
	return fmt.Sprintf("%d workers", n)
}
