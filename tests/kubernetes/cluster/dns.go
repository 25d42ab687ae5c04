package main

// The cluster's DNS: A records of Services (the cluster IP, or each ready endpoint of a headless Service) and of the named
// endpoints of a headless Service (ps-0.ps.NAMESPACE.svc.cluster.local). It answers over UDP and asks no other server: any
// other name does not exist.

import (
	"context"
	"net"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/net/dns/dnsmessage"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	discoverylisters "k8s.io/client-go/listers/discovery/v1"
	"k8s.io/client-go/tools/clientcmd"
)

const (
	suffix       = ".svc.cluster.local"
	addressesMax = 25 // so that an answer fits in 512 bytes
	ttlSeconds   = 1  // tests replace Pods and look again at once
	resyncPeriod = 10 * time.Minute
)

type resolver struct {
	services       corelisters.ServiceLister
	endpointSlices discoverylisters.EndpointSliceLister
}

// lookup returns the IPv4 addresses of a name, and whether the name exists.
func (r *resolver) lookup(name string) ([]net.IP, bool) {
	name, ours := strings.CutSuffix(strings.ToLower(strings.TrimSuffix(name, ".")), suffix)
	if !ours {
		return nil, false
	}
	parts := strings.Split(name, ".")
	host := ""
	if len(parts) == 3 {
		host, parts = parts[0], parts[1:]
	}
	if len(parts) != 2 {
		return nil, false
	}
	service, namespace := parts[0], parts[1]
	found, err := r.services.Services(namespace).Get(service)
	if err != nil {
		return nil, false
	}
	if address := net.ParseIP(found.Spec.ClusterIP); address != nil {
		return []net.IP{address}, host == ""
	}
	addresses := r.endpoints(namespace, service, host, found.Spec.PublishNotReadyAddresses)
	return addresses, host == "" || len(addresses) > 0
}

// endpoints returns the addresses of a headless Service's endpoints: of all, or of those with this host name.
func (r *resolver) endpoints(namespace, service, host string, notReadyToo bool) []net.IP {
	ofService := labels.SelectorFromSet(labels.Set{"kubernetes.io/service-name": service})
	slices, err := r.endpointSlices.EndpointSlices(namespace).List(ofService)
	if err != nil {
		return nil
	}
	var addresses []net.IP
	for _, slice := range slices {
		for _, endpoint := range slice.Endpoints {
			named := endpoint.Hostname != nil && *endpoint.Hostname == host
			ready := endpoint.Conditions.Ready == nil || *endpoint.Conditions.Ready || notReadyToo
			if !ready || (host != "" && !named) {
				continue
			}
			for _, text := range endpoint.Addresses {
				if address := net.ParseIP(text).To4(); address != nil {
					addresses = append(addresses, address)
				}
			}
		}
	}
	return addresses
}

// answer returns the reply to one datagram, or nil if it is no question.
func (r *resolver) answer(datagram []byte) []byte {
	var parser dnsmessage.Parser
	header, err := parser.Start(datagram)
	if err != nil {
		return nil
	}
	question, err := parser.Question()
	if err != nil {
		return nil
	}
	addresses, exists := r.lookup(question.Name.String())
	reply := dnsmessage.Message{
		Header: dnsmessage.Header{
			ID: header.ID, Response: true, Authoritative: true,
			RecursionDesired: header.RecursionDesired, RecursionAvailable: true,
		},
		Questions: []dnsmessage.Question{question},
	}
	if !exists {
		reply.RCode = dnsmessage.RCodeNameError
	}
	if question.Type == dnsmessage.TypeA {
		for _, address := range addresses[:min(len(addresses), addressesMax)] {
			reply.Answers = append(reply.Answers, dnsmessage.Resource{
				Header: dnsmessage.ResourceHeader{Name: question.Name, Class: dnsmessage.ClassINET, TTL: ttlSeconds},
				Body:   &dnsmessage.AResource{A: [4]byte(address.To4())},
			})
		}
	}
	packed, err := reply.Pack()
	if err != nil {
		return nil
	}
	return packed
}

// serve answers until the socket fails.
func serve(kubeconfig, listen string) error {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	factory := informers.NewSharedInformerFactory(client, resyncPeriod)
	names := &resolver{factory.Core().V1().Services().Lister(), factory.Discovery().V1().EndpointSlices().Lister()}
	forever := context.Background().Done()
	factory.Start(forever)
	factory.WaitForCacheSync(forever)
	socket, err := net.ListenPacket("udp", listen)
	if err != nil {
		return err
	}
	datagram := make([]byte, 4096)
	for {
		length, sender, err := socket.ReadFrom(datagram)
		if err != nil {
			return err
		}
		if reply := names.answer(datagram[:length]); reply != nil {
			// A reply that is lost is asked for again.
			_, _ = socket.WriteTo(reply, sender)
		}
	}
}

func newDNSCommand() *cobra.Command {
	var kubeconfig, listen string
	command := &cobra.Command{
		Use:  "kube-dns",
		RunE: func(*cobra.Command, []string) error { return serve(kubeconfig, listen) },
	}
	command.Flags().StringVar(&kubeconfig, "kubeconfig", "", "how to reach the API server")
	command.Flags().StringVar(&listen, "listen", "", "address and port of the answers")
	return command
}
